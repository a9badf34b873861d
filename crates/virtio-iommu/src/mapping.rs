//! Mappings and access targets.

use ringfence_types::{Access, IovaRange, Permissions, PhysAddr, PhysRange};

/// Type of memory behind a mapping, as the driver declares it (virtio 1.3, section 5.13.6.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory without restrictions on the kind of access.
    Normal,
    /// A memory-mapped device: accesses must not be speculated, cached, split or combined.
    Mmio,
}

/// The mapping of one MAP request. No request removes only a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// IOVA range, aligned to the granule.
    pub iova: IovaRange,
    /// Guest-physical address of the first byte. The last byte is at most 2^64 - 1.
    pub physical: PhysAddr,
    /// Accesses that endpoints may make.
    pub permissions: Permissions,
    /// Type of memory.
    pub memory: MemoryKind,
}

impl Mapping {
    /// Returns the guest-physical range.
    pub fn physical_range(&self) -> Option<PhysRange> {
        let extra = self.iova.last().offset_from(&self.iova.start())?;
        PhysRange::inclusive(self.physical, self.physical.checked_add(extra)?)
    }

    /// Returns true if the mapping allows `access`.
    pub fn allows(&self, access: Access) -> bool {
        self.permissions.allows(access)
    }
}

/// Target of an endpoint's access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessTarget {
    /// Guest-physical memory: the range of the first bytes of the access. It has at least one byte
    /// and ends with the mapping.
    Memory {
        /// Guest-physical range of these bytes.
        physical: PhysRange,
        /// Type of memory.
        memory: MemoryKind,
    },
    /// Doorbells of message signaled interrupts, untranslated; never memory.
    Doorbell {
        /// IOVA range of the access.
        at: IovaRange,
    },
}
