//! Finds accesses that a cached entry permits although the driver has cleared or changed its slot.

use ringfence_hw::{RingUnit, RingUnitConfig, Translate};
use ringfence_riommu_device::RiommuDevice;
use ringfence_types::{Access, Iova, PhysAddr, PhysMemory, PhysRange, RequesterId};

/// A ring unit without caches. It walks the guest's tables and decides nothing.
#[derive(Debug)]
pub(super) struct ClearOracle {
    unit: RingUnit,
}

impl ClearOracle {
    pub(super) fn new() -> Self {
        let mut unit = RingUnit::new(&RingUnitConfig {
            fault_log: 0,
            ..RingUnitConfig::UNCACHED
        });
        unit.enable();
        Self { unit }
    }

    /// Returns true if the guest's tables do not permit the access that `iommu` has just translated
    /// to `permitted`.
    pub(super) fn is_cleared<M: PhysMemory + ?Sized>(
        &mut self,
        iommu: &RiommuDevice,
        memory: &M,
        (device, iova, access): (RequesterId, Iova, Access),
        permitted: PhysRange,
    ) -> bool {
        let root = PhysAddr::new(iommu.save().root);
        self.unit.set_root_table(root);
        let bytes = permitted.bytes();
        let walked = self.unit.translate(memory, device, iova, bytes, access);
        !walked.is_ok_and(|walked| walked.first() == permitted)
    }
}
