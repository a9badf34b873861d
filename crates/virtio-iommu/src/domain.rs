//! Domains and their mappings.

use alloc::vec::Vec;

use ringfence_types::{Iova, IovaRange, Permissions, PhysAddr};

use crate::spec::VIRTIO_IOMMU_MAP_F_MMIO;
use crate::store::{Entry, MappingStore};
use crate::{DomainId, Mapping, MemoryKind};

/// The kind of domain that an ATTACH requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttachKind {
    /// All guest-physical memory, untranslated.
    Bypass,
    /// The domain's mappings. Each UNMAP invalidates.
    Strict,
    /// The domain's mappings, in [lazy mode](crate::lazy).
    Lazy,
}

/// Accesses that a domain allows to its endpoints.
#[derive(Debug)]
pub(crate) enum DomainKind {
    /// All guest-physical memory, untranslated.
    Bypass,
    /// The domain's mappings.
    Mapped(MappingStore),
    /// None, because the sink failed to unmap. Lasts until the last endpoint is detached.
    Blocked,
}

/// A domain. It exists as long as an endpoint is attached to it.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) id: DomainId,
    pub(crate) kind: DomainKind,
    /// True if the domain is in [lazy mode](crate::lazy).
    pub(crate) lazy: bool,
    /// Number of attached endpoints.
    pub(crate) endpoints: usize,
    /// Reserved ranges of its endpoints, each once.
    pub(crate) reserved: Vec<IovaRange>,
}

impl Entry {
    /// Returns the mapping for the sink. `None` if it allows no access, or if no request could make
    /// its range.
    pub(crate) fn mapping(&self) -> Option<Mapping> {
        Some(Mapping {
            iova: self.range()?,
            physical: PhysAddr::new(self.physical),
            permissions: self.permissions()?,
            memory: self.memory(),
        })
    }

    /// Returns the IOVA range.
    pub(crate) const fn range(&self) -> Option<IovaRange> {
        IovaRange::inclusive(Iova::new(self.start), Iova::new(self.last))
    }

    /// Returns the permissions. The flags READ and WRITE are the bits of [`Permissions`].
    pub(crate) const fn permissions(&self) -> Option<Permissions> {
        Permissions::from_bits(self.flags as u64)
    }

    pub(crate) const fn memory(&self) -> MemoryKind {
        if self.flags & VIRTIO_IOMMU_MAP_F_MMIO == 0 {
            MemoryKind::Normal
        } else {
            MemoryKind::Mmio
        }
    }
}
