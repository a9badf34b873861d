//! Handle through which the owner of a `SoftIommu` maps and unmaps in one domain.

use ringfence_types::{DomainId, IovaRange, Permissions, PhysAddr};

use crate::domain::Domain;
use crate::error::{DomainMapError, DomainUnmapError};

/// Exclusive access to the mappings of one domain of a [`SoftIommu`](crate::SoftIommu).
///
/// This is a handle because `&mut Domain` would let a caller swap two domains. Each would then wait
/// for the readers of the other.
pub struct DomainMut<'u, M> {
    domain: &'u mut Domain<M>,
}

impl<'u, M> DomainMut<'u, M> {
    #[inline]
    pub(crate) fn new(domain: &'u mut Domain<M>) -> Self {
        Self { domain }
    }

    /// Returns the domain id.
    pub fn id(&self) -> DomainId {
        self.domain.id()
    }

    /// Returns the number of tables in use, 4 KiB each, including the root. Never exceeds
    /// [`SoftIommuLimits::tables`](crate::SoftIommuLimits::tables).
    pub fn tables(&self) -> usize {
        self.domain.tables()
    }

    /// Maps `range`, which must be whole pages, to the memory at `memory`. On return, every access
    /// ordered after this call is translated. A doorbell, a channel or any other notification of
    /// the device's thread provides that order.
    ///
    /// Maps all of the range or nothing. Waits for readers only if the domain has run out of tables
    /// and can reclaim empty ones.
    ///
    /// # Errors
    /// See [`DomainMapReason`](crate::DomainMapReason). Nothing has changed.
    #[inline]
    pub fn map(
        &mut self,
        range: IovaRange,
        memory: PhysAddr,
        permissions: Permissions,
    ) -> Result<(), DomainMapError> {
        self.domain.map(range, memory, permissions)
    }

    /// Unmaps all mapped pages of `range`, which must be whole pages. On return, no reader
    /// translates any of them, and no reader holds a slice of any of them. Returns the number of
    /// pages that were mapped.
    ///
    /// If any page was mapped, waits until each online reader of the domain's endpoints passes a
    /// quiescent state.
    ///
    /// # Errors
    /// The range does not consist of whole pages, or the calling thread is in a read section.
    /// Nothing has changed.
    #[inline]
    pub fn unmap(&mut self, range: IovaRange) -> Result<u64, DomainUnmapError> {
        self.domain.unmap(range)
    }

    /// Unmaps each of `ranges` as [`unmap`](Self::unmap) does, with a single wait.
    ///
    /// # Errors
    /// As for [`unmap`](Self::unmap). No range has changed.
    #[inline]
    pub fn unmap_all<R>(&mut self, ranges: R) -> Result<u64, DomainUnmapError>
    where
        R: IntoIterator<Item = IovaRange, IntoIter: Clone>,
    {
        self.domain.unmap_all(ranges)
    }

    /// Clears the entries of `range`. Readers may still hold their translations: the caller calls
    /// [`SoftIommu::synchronize`](crate::SoftIommu::synchronize) before it reuses the memory.
    #[cfg(feature = "virtio-iommu")]
    #[inline]
    pub(crate) fn unmap_nosync(&mut self, range: &IovaRange) {
        self.domain.clear(range);
    }
}
