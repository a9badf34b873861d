//! Mappings as sinks and devices see them.

use ringfence_types::{Access, IovaRange, Permissions, PhysAddr, PhysRange};

/// What the driver says lies behind a mapping (virtio 1.3, section 5.13.6.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory.
    Normal,
    /// A memory-mapped device: accesses are neither speculated, cached, split nor combined.
    Mmio,
}

/// What one MAP request made. It goes as one, too: no request removes a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// The device-visible addresses: whole granules.
    pub iova: IovaRange,
    /// Guest-physical address of the first byte. The last byte is at most 2^64 - 1.
    pub physical: PhysAddr,
    /// What endpoints may do.
    pub permissions: Permissions,
    /// What lies behind it.
    pub memory: MemoryKind,
}

impl Mapping {
    /// The guest-physical range.
    pub fn physical_range(&self) -> Option<PhysRange> {
        let extra = self.iova.last().offset_from(&self.iova.start())?;
        PhysRange::inclusive(self.physical, self.physical.checked_add(extra)?)
    }

    /// Whether the mapping allows `access`.
    pub fn allows(&self, access: Access) -> bool {
        self.permissions.allows(access)
    }
}

/// Where an access of an endpoint goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessTarget {
    /// To guest-physical memory: the range of the first bytes of the access, at least one byte and
    /// as far as one mapping goes.
    Memory {
        /// Guest-physical addresses.
        physical: PhysRange,
        /// What the driver said lies there.
        memory: MemoryKind,
    },
    /// To the doorbells of message signaled interrupts, untranslated; never to memory.
    Doorbell {
        /// The addresses, as the endpoint put them on the bus.
        at: IovaRange,
    },
}
