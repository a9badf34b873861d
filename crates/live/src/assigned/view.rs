//! Guest memory in an assigned device's view, for one access: the IOMMU hardware translates every
//! address.
//!
//! The access holds the hardware's lock from the first translation to the last byte. It therefore
//! uses no translation after that translation's invalidation has completed. No slice outlives the
//! access.

use std::cell::{Cell, RefCell};

use ringfence_hw::VtdUnit;
use ringfence_memory::Arena;
use ringfence_types::{Access, Fault, FaultReason, Iova, RequesterId};
use vm_memory::bitmap::BS;
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap,
    GuestMemoryRegion, GuestMemoryResult, Permissions,
};

use crate::dma::{PAGE_BYTES, Part, PartSlices, RangeAccess};
use crate::host::FrameRmap;

/// Memory that a device can access while it holds the hardware's lock.
#[derive(Debug)]
pub struct HardwareView<'a> {
    pub(super) unit: RefCell<&'a mut VtdUnit>,
    /// Memory of the unit's tables.
    pub(super) tables: &'a Arena,
    pub(super) rmap: &'a FrameRmap,
    pub(super) guest: &'a GuestMemoryMmap,
    pub(super) device: RequesterId,
    /// First fault of the access.
    pub(super) fault: Cell<Option<Fault>>,
}

impl HardwareView<'_> {
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
        let mut unit = self.unit.borrow_mut();
        let found = unit.translate(self.tables, self.device, iova, bytes, access)?;
        let mut parts = Vec::new();
        for range in found.as_slice() {
            let (mut at, mut left) = (range.start(), range.bytes());
            while left > 0 {
                // Contiguous frames may have scattered pages.
                let bytes = left.min(PAGE_BYTES - at.offset_in(PAGE_BYTES));
                let page = self.rmap.page(at).ok_or(Fault {
                    device: self.device,
                    iova,
                    access,
                    reason: FaultReason::TableAccess,
                })?;
                parts.push((GuestAddress(page.get()), bytes as usize));
                at = at.wrapping_add(bytes);
                left -= bytes;
            }
        }
        Ok(parts)
    }
}

impl GuestMemory for HardwareView<'_> {
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
