//! The rule that selects the IOMMU of a device (rIOMMU section 4, "Applicability and Limitations").

use ringfence_pgtable::MAX_RING_SLOTS;

use crate::IommuKind;

/// The order in which a driver unmaps the buffers of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnmapOrder {
    /// The order of a circular ring: network adapters, and NVMe ("circular rings that impose a
    /// strict (un)mapping order").
    Ring,
    /// The device processes its slots in arbitrary order, and the driver unmaps in that order
    /// (AHCI).
    Arbitrary,
    /// Buffers stay mapped, because a remote peer chooses what it accesses (RDMA).
    Never,
}

/// The properties of a device that select its IOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DmaUsage {
    /// Order of unmaps.
    pub order: UnmapOrder,
    /// Number of ring tables that the device would need: two for each of its rings, for descriptors
    /// and for buffers.
    pub tables: u32,
    /// Maximum number of mappings of a table.
    pub slots: u32,
}

impl DmaUsage {
    /// Largest number of tables of a device: `size` of an rDEVICE has 16 bits (Fig. 9a).
    pub const MAX_TABLES: u32 = u16::MAX as u32;

    /// A network adapter that exposes memory to remote peers.
    pub const RDMA: Self = Self {
        order: UnmapOrder::Never,
        tables: 0,
        slots: 0,
    };

    /// A device with `rings` rings, each with at most `slots` mappings.
    pub const fn rings(rings: u32, slots: u32) -> Self {
        Self {
            order: UnmapOrder::Ring,
            tables: rings.saturating_mul(2),
            slots,
        }
    }
}

impl IommuKind {
    /// Returns the unit for a device: the ring unit if the device unmaps in ring order and fits the
    /// unit's tables, otherwise the baseline unit.
    pub const fn for_device(usage: &DmaUsage) -> Self {
        let fits = usage.tables > 0
            && usage.tables <= DmaUsage::MAX_TABLES
            && usage.slots > 0
            && usage.slots <= MAX_RING_SLOTS;
        match usage.order {
            UnmapOrder::Ring if fits => Self::Ring,
            UnmapOrder::Ring | UnmapOrder::Arbitrary | UnmapOrder::Never => Self::Baseline,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_rings_do_not_fit_have_the_baseline_unit() {
        let arbitrary = DmaUsage {
            order: UnmapOrder::Arbitrary,
            ..DmaUsage::rings(1, 32)
        };
        for (usage, wanted) in [
            (DmaUsage::rings(1, 1), IommuKind::Ring),
            (DmaUsage::rings(32_767, MAX_RING_SLOTS), IommuKind::Ring),
            (DmaUsage::rings(32_768, 1), IommuKind::Baseline),
            (DmaUsage::rings(u32::MAX, 1), IommuKind::Baseline),
            (DmaUsage::rings(0, 1), IommuKind::Baseline),
            (DmaUsage::rings(1, 0), IommuKind::Baseline),
            (DmaUsage::rings(1, MAX_RING_SLOTS + 1), IommuKind::Baseline),
            (arbitrary, IommuKind::Baseline),
            (DmaUsage::RDMA, IommuKind::Baseline),
        ] {
            assert_eq!(IommuKind::for_device(&usage), wanted, "{usage:?}");
        }
    }
}
