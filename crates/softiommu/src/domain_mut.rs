//! The handle by which a unit's owner changes one of its domains.

use ringfence_types::{DomainId, IovaRange, Permissions, PhysAddr};

use crate::domain::Domain;
use crate::error::{MapError, UnmapError};

/// The right to map and unmap in one domain of a [`SoftIommu`](crate::SoftIommu).
///
/// A handle and not `&mut` to the domain: two domains that changed places would each wait for the
/// other's readers.
pub struct DomainMut<'u, M> {
    domain: &'u mut Domain<M>,
}

impl<'u, M> DomainMut<'u, M> {
    #[inline]
    pub(crate) fn new(domain: &'u mut Domain<M>) -> Self {
        Self { domain }
    }

    /// Its identifier.
    pub fn id(&self) -> DomainId {
        self.domain.id()
    }

    /// Tables in use, 4 KiB each, the root included. Never more than
    /// [`SoftIommuLimits::tables`](crate::SoftIommuLimits::tables).
    pub fn tables(&self) -> usize {
        self.domain.tables()
    }

    /// Maps the whole pages of `range` to the memory from `memory` on. When this returns, every
    /// access that is ordered after it is translated: by a doorbell, a channel, or whatever else
    /// tells a device's thread of its work.
    ///
    /// All of the range is mapped, or nothing is. Waits for readers only where tables ran out and
    /// empty ones can be had back.
    ///
    /// # Errors
    /// See [`MapReason`](crate::MapReason): nothing has changed.
    #[inline]
    pub fn map(
        &mut self,
        range: IovaRange,
        memory: PhysAddr,
        permissions: Permissions,
    ) -> Result<(), MapError> {
        self.domain.map(range, memory, permissions)
    }

    /// Unmaps whatever is mapped of the whole pages of `range`. When this returns, no reader
    /// translates any of them, and no slice that any reader got from one is left. Returns how many
    /// pages were mapped.
    ///
    /// Waits for the readers that are online: the next checkpoint of each.
    ///
    /// # Errors
    /// The range is not whole pages, or this thread is a reader itself: nothing has changed.
    #[inline]
    pub fn unmap(&mut self, range: IovaRange) -> Result<u64, UnmapError> {
        self.domain.unmap(range)
    }

    /// As [`unmap`](Self::unmap) of each of `ranges`, with one wait for all.
    ///
    /// # Errors
    /// As for [`unmap`](Self::unmap); no range has changed.
    #[inline]
    pub fn unmap_all<R>(&mut self, ranges: R) -> Result<u64, UnmapError>
    where
        R: IntoIterator<Item = IovaRange, IntoIter: Clone>,
    {
        self.domain.unmap_all(ranges)
    }

    /// Clears the entries of `range`, and returns how many were present. Readers may hold what they
    /// got by them until they have been waited for.
    #[cfg(feature = "virtio-iommu")]
    #[inline]
    pub(crate) fn clear(&mut self, range: &IovaRange) -> u64 {
        self.domain.clear(range)
    }
}
