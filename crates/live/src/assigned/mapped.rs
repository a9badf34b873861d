//! Mappings of one assigned device by range, for an IOMMU whose requests are ranges, and for a host
//! that maps a whole guest.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use ringfence_pviommu::backend::{DeviceSlot, GuestBacking, IoError, IoTables, PinError};
use ringfence_pviommu::wire::{Gpa, PAGE_BYTES};
use ringfence_types::{Access, Direction, Iova, IovaRange, Permissions, RequesterId};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::{AssignedTables, Hardware};
use crate::host::{HostPagePool, Memory};

/// Slot of the only device of its tables.
const ONLY: DeviceSlot = DeviceSlot::new(0);

/// Reason why a range was not mapped. No page of it is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MapFailure {
    /// The range is outside guest memory, or is not page-aligned.
    NotMemory,
    /// No frame is free, for a page or for a table.
    NoRoom,
    /// Any other failure.
    Failed,
}

/// A device's I/O page table, and the frames that its entries pin.
#[derive(Debug)]
pub(crate) struct AssignedTable {
    memory: Memory,
    tables: AssignedTables,
    /// By first IOVA: the range, and the guest page of its first page.
    ranges: BTreeMap<Iova, (IovaRange, Gpa)>,
    /// Unmapped ranges whose invalidation is not complete; their frames stay pinned.
    unmapping: Vec<(IovaRange, Gpa)>,
}

impl AssignedTable {
    /// Creates an empty table for `device`, which is blocked until it is attached.
    ///
    /// # Errors
    /// The host has no memory for the tables.
    pub(crate) fn new(hardware: &Arc<Hardware>, device: RequesterId) -> io::Result<Self> {
        Ok(Self {
            memory: Memory::on_demand(hardware.host(), HostPagePool::Off)?,
            tables: AssignedTables::new(hardware, &[device])?,
            ranges: BTreeMap::new(),
            unmapping: Vec::new(),
        })
    }

    /// Lets the device access the mapped pages.
    pub(crate) fn attach(&self) {
        self.tables.attach();
    }

    /// Blocks the device. When it returns, no access is in progress.
    pub(crate) fn detach(&self) {
        self.tables.detach();
    }

    /// Replaces the guest's memory. When it returns, the device cannot access the old memory.
    pub(crate) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.memory.set_memory(memory);
        self.tables.set_memory(memory);
    }

    /// Maps `range` to the guest's memory at `to`.
    ///
    /// # Errors
    /// [`MapFailure`].
    pub(crate) fn map(
        &mut self,
        range: IovaRange,
        to: u64,
        permissions: Permissions,
    ) -> Result<(), MapFailure> {
        let to = Gpa::new(to);
        let whole = range.start().is_aligned(PAGE_BYTES)
            && range.bytes().is_multiple_of(PAGE_BYTES)
            && to.is_aligned(PAGE_BYTES)
            && to.checked_add(range.bytes() - 1).is_some();
        if !whole {
            return Err(MapFailure::NotMemory);
        }
        let direction = direction(permissions);
        for (done, (iova, gpa)) in pages(range, to).enumerate() {
            if let Err(error) = self.map_page(iova, gpa, direction) {
                let done = IovaRange::new(range.start(), done as u64 * PAGE_BYTES);
                if let Some(done) = done {
                    self.clear(done, to);
                    let _ = self.commit();
                }
                return Err(error);
            }
        }
        self.ranges.insert(range.start(), (range, to));
        Ok(())
    }

    /// Pins a frame and maps it, or does neither.
    fn map_page(&mut self, iova: Iova, gpa: Gpa, direction: Direction) -> Result<(), MapFailure> {
        let frame = self.memory.pin(gpa).map_err(|error| match error {
            PinError::NotMemory => MapFailure::NotMemory,
            PinError::NoRoom => MapFailure::NoRoom,
            PinError::Corrupt => MapFailure::Failed,
        })?;
        let mapped = self.tables.map(ONLY, iova, frame, direction);
        mapped.map_err(|error| {
            self.memory.unpin(gpa);
            match error {
                IoError::NoRoom => MapFailure::NoRoom,
                IoError::Failed => MapFailure::Failed,
            }
        })
    }

    /// Unmaps the range that begins at `start`. The unmap is complete after the next
    /// [`commit`](Self::commit).
    pub(crate) fn unmap(&mut self, start: Iova) {
        if let Some((range, to)) = self.ranges.remove(&start) {
            self.clear(range, to);
        }
    }

    /// Like [`unmap`](Self::unmap), for all ranges.
    pub(crate) fn unmap_all(&mut self) {
        for (range, to) in std::mem::take(&mut self.ranges).into_values() {
            self.clear(range, to);
        }
    }

    /// Identity-maps the ranges of `memory` that are not in `before`, and unmaps those that it no
    /// longer has. Returns the mapped ranges.
    pub(super) fn follow(
        &mut self,
        before: &[IovaRange],
        memory: &GuestMemoryMmap,
    ) -> Vec<IovaRange> {
        let now = memory.iter().filter_map(|region| {
            let start = Iova::new(region.start_addr().raw_value());
            IovaRange::new(start, region.len())
        });
        let mut now: Vec<IovaRange> = now.collect();
        for range in before.iter().filter(|range| !now.contains(range)) {
            self.unmap(range.start());
        }
        let _ = self.commit();
        now.retain(|range| {
            // A range without room or with partial pages stays unmapped, and accesses to it fault.
            let to = range.start().get();
            before.contains(range) || self.map(*range, to, Permissions::READ_WRITE).is_ok()
        });
        let _ = self.commit();
        now
    }

    fn clear(&mut self, range: IovaRange, to: Gpa) {
        for (iova, _) in pages(range, to) {
            // The page is mapped, so only a corrupt table can refuse.
            let _ = self.tables.unmap(ONLY, iova);
        }
        self.unmapping.push((range, to));
    }

    /// Completes the invalidations. On `Ok`, the device cannot access the unmapped pages, and no
    /// access to them is in progress.
    ///
    /// # Errors
    /// The device may still have access, and its frames stay pinned.
    pub(crate) fn commit(&mut self) -> Result<(), IoError> {
        self.tables.commit(ONLY)?;
        for (range, to) in self.unmapping.drain(..) {
            for (_, gpa) in pages(range, to) {
                self.memory.unpin(gpa);
            }
        }
        self.memory.maintain();
        Ok(())
    }
}

/// Returns the pages of `range` with the guest page of each.
fn pages(range: IovaRange, to: Gpa) -> impl Iterator<Item = (Iova, Gpa)> {
    let count = range.bytes() / PAGE_BYTES;
    (0..count).map(move |page| {
        let offset = page * PAGE_BYTES;
        // Neither address wraps.
        (range.start().wrapping_add(offset), to.wrapping_add(offset))
    })
}

fn direction(permissions: Permissions) -> Direction {
    match (
        permissions.allows(Access::Read),
        permissions.allows(Access::Write),
    ) {
        (true, false) => Direction::ToDevice,
        (false, _) => Direction::FromDevice,
        (true, true) => Direction::Bidirectional,
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;
    use crate::counters::DeviceCounters;
    use crate::host::Host;

    const PAGES: u64 = 64;

    fn memory(pages: u64) -> GuestMemoryMmap {
        let bytes = (pages * PAGE_BYTES) as usize;
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)]).unwrap()
    }

    /// PV01: without an IOMMU, each page of the guest is pinned once while the client shares it.
    #[test]
    fn all_of_a_guest_is_pinned() {
        let host = Host::new(Arc::new(DeviceCounters::default())).unwrap();
        let hardware = Arc::new(Hardware::new(Arc::new(host)).unwrap());
        let mut table = AssignedTable::new(&hardware, RequesterId::new(8)).unwrap();
        let pins = |table: &AssignedTable| -> Vec<Option<u32>> {
            let pages = (0..PAGES).map(|page| Gpa::new(page * PAGE_BYTES));
            pages.map(|page| table.memory.pins(page)).collect()
        };
        assert_eq!(pins(&table), [Some(0); PAGES as usize]);
        let mut ranges = Vec::new();
        for shared in [PAGES, PAGES / 2] {
            let memory = memory(shared);
            table.set_memory(&memory);
            ranges = table.follow(&ranges, &memory);
            let wanted = (0..PAGES).map(|page| Some(u32::from(page < shared)));
            assert_eq!(pins(&table), wanted.collect::<Vec<_>>(), "{shared} pages");
        }
    }
}
