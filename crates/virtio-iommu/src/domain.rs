//! Domains: what the endpoints attached to one reach.

use alloc::vec::Vec;

use ringfence_types::{Iova, IovaRange, Permissions, PhysAddr};

use crate::spec::VIRTIO_IOMMU_MAP_F_MMIO;
use crate::store::{Entry, MappingStore};
use crate::{DomainId, Mapping, MemoryKind};

/// What endpoints of a domain reach.
#[derive(Debug)]
pub(crate) enum DomainKind {
    /// All guest-physical memory, untranslated.
    Bypass,
    /// What is mapped.
    Mapped(MappingStore),
    /// Nothing, because the sink failed to unmap. It stays so until the last endpoint is detached.
    Blocked,
}

/// One domain. It exists as long as an endpoint is attached to it.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) id: DomainId,
    pub(crate) kind: DomainKind,
    /// How many endpoints are attached.
    pub(crate) endpoints: usize,
    /// What is reserved for any of them, each range once.
    pub(crate) reserved: Vec<IovaRange>,
}

impl Entry {
    /// The mapping as a sink is told of it; `None` if it allows nothing, or is a range that no
    /// request makes.
    pub(crate) fn mapping(&self) -> Option<Mapping> {
        Some(Mapping {
            iova: self.range()?,
            physical: PhysAddr::new(self.physical),
            permissions: self.permissions()?,
            memory: self.memory(),
        })
    }

    /// The addresses.
    pub(crate) const fn range(&self) -> Option<IovaRange> {
        IovaRange::inclusive(Iova::new(self.start), Iova::new(self.last))
    }

    /// What it allows. The flags READ and WRITE are the bits of [`Permissions`].
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
