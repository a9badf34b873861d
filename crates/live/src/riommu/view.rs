//! Guest memory as a device behind the ring IOMMU sees it.
//!
//! An access holds the IOMMU's lock from the first translation to the last byte. It therefore uses
//! no translation after that translation's invalidation has completed.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use ringfence_hw::RingStats;
use ringfence_riommu_device::RiommuDevice;
use ringfence_types::{Access, Fault, FaultReason, Iova, PhysRange, RequesterId};
use vm_memory::bitmap::BS;
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap,
    GuestMemoryRegion, GuestMemoryResult, Permissions,
};

use super::clear_oracle::ClearOracle;
use super::memory::GuestWords;
use super::{Model, RingIommu};
use crate::counters::DeviceCounters;
use crate::dma::{Dma, MemoryInUse, PAGE_BYTES, Part, PartSlices, RangeAccess};

/// Memory view of a device behind the ring IOMMU.
#[derive(Debug)]
pub struct RingDma {
    iommu: RingIommu,
    device: RequesterId,
    counters: Arc<DeviceCounters>,
}

impl RingDma {
    pub(super) fn new(
        iommu: RingIommu,
        device: RequesterId,
        counters: Arc<DeviceCounters>,
    ) -> Self {
        Self {
            iommu,
            device,
            counters,
        }
    }

    /// Adds the unit's work since `before`.
    fn count(&self, before: &RingStats, now: &RingStats) {
        let more = |count: fn(&RingStats) -> u64| count(now).wrapping_sub(count(before));
        let hits = more(|stats| stats.hits).wrapping_add(more(|stats| stats.prefetch_hits));
        let walks = more(|stats| stats.misses).wrapping_add(more(|stats| stats.slot_walks));
        self.counters.unit_hits.add(hits);
        self.counters.unit_walks.add(walks);
    }
}

impl Dma for RingDma {
    type View<'a> = RingView<'a>;

    fn with<R>(&mut self, access: impl FnOnce(&RingView<'_>) -> R) -> R {
        let mut model = self.iommu.model();
        let Model {
            device: iommu,
            oracle,
            guest,
            is_master,
        } = &mut *model;
        let before = *iommu.unit().stats();
        let view = RingView {
            iommu: is_master.then_some(RefCell::new((&mut *iommu, oracle))),
            guest,
            device: self.device,
            counters: &self.counters,
            fault: Cell::new(None),
        };
        let result = access(&view);
        let fault = view.fault.take();
        self.count(&before, iommu.unit().stats());
        let due = iommu.take_interrupt();
        drop(model);
        if fault.is_some() {
            self.iommu.shared.counters.faults.add(1);
        }
        if due {
            self.iommu.wake();
        }
        result
    }

    /// Does nothing: the client of the IOMMU shares the guest's memory, and unmaps from the IOMMU
    /// what it unmaps from the device.
    fn set_memory(&mut self, _memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        Ok(())
    }
}

/// Memory that a device can access while it holds the IOMMU's lock.
#[derive(Debug)]
pub struct RingView<'a> {
    /// `None` while the IOMMU may not read its tables.
    iommu: Option<RefCell<(&'a mut RiommuDevice, &'a mut ClearOracle)>>,
    guest: &'a GuestMemoryMmap,
    device: RequesterId,
    counters: &'a DeviceCounters,
    /// First fault of the access.
    fault: Cell<Option<Fault>>,
}

impl RingView<'_> {
    /// Translates `count` bytes at `addr`. Fails unless the device may access all of them.
    fn parts(
        &self,
        addr: GuestAddress,
        count: usize,
        wanted: Permissions,
    ) -> Result<Vec<Part>, GuestMemoryError> {
        let range = RangeAccess {
            device: self.device,
            addr,
            bytes: count,
            wanted,
        };
        range.translate(&self.fault, |iova, bytes, access| {
            self.translated(iova, bytes, access)
        })
    }

    fn translated(&self, iova: Iova, bytes: u64, access: Access) -> Result<Vec<Part>, Fault> {
        let Some(iommu) = &self.iommu else {
            return Err(Fault {
                device: self.device,
                iova,
                access,
                reason: FaultReason::Blocked,
            });
        };
        let memory = GuestWords(self.guest);
        let (iommu, oracle) = &mut *iommu.borrow_mut();
        let before = cached(iommu);
        let found = iommu.translate(&memory, self.device, iova, bytes, access)?;
        if cached(iommu) != before {
            let translated = (self.device, iova, access);
            if oracle.is_cleared(iommu, &memory, translated, found) {
                self.count_after_clear(access);
            }
        }
        Ok(pages(found))
    }

    fn count_after_clear(&self, access: Access) {
        match access {
            Access::Read => self.counters.reads_after_clear.add(1),
            Access::Write => self.counters.writes_after_clear.add(1),
        }
    }
}

/// Returns the number of accesses by cached slots. All others have read the tables.
fn cached(iommu: &RiommuDevice) -> u64 {
    let stats = iommu.unit().stats();
    stats.hits.wrapping_add(stats.prefetch_hits)
}

/// Splits a range at page boundaries, because a range of pages may lie in several mappings.
fn pages(range: PhysRange) -> Vec<Part> {
    let (mut at, mut left) = (range.start(), range.bytes());
    let mut parts = Vec::new();
    while left > 0 {
        let bytes = left.min(PAGE_BYTES - at.offset_in(PAGE_BYTES));
        parts.push((GuestAddress(at.get()), bytes as usize));
        at = at.wrapping_add(bytes);
        left -= bytes;
    }
    parts
}

impl GuestMemory for RingView<'_> {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = <<GuestMemoryMmap as GuestMemoryBackend>::R as GuestMemoryRegion>::B;

    fn check_range(&self, addr: GuestAddress, count: usize, access: Permissions) -> bool {
        let slices = self.get_slices(addr, count, access);
        slices.is_ok_and(|mut slices| slices.all(|slice| slice.is_ok()))
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> GuestMemoryResult<impl GuestMemorySliceIterator<'a, BS<'a, Self::Bitmap>>> {
        let parts = self.parts(addr, count, access)?;
        Ok(PartSlices::new(self.guest, parts))
    }
}
