//! What one assigned device reaches, by ranges: for an IOMMU whose requests are ranges, and for the
//! host that maps all of a guest.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use ringfence_pviommu::backend::{DeviceSlot, GuestBacking, IoError, IoTables, PinError};
use ringfence_pviommu::wire::{Gpa, PAGE_BYTES};
use ringfence_types::{Access, Direction, Iova, IovaRange, Permissions, RequesterId};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::{AssignedTables, Hardware};
use crate::host::{HostPagePool, Memory};

/// The only device of its tables.
const ONLY: DeviceSlot = DeviceSlot::new(0);

/// Why a range was not mapped. Nothing of it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MapFailure {
    /// It leads to what is no memory of the guest, or is not made of whole pages.
    NotMemory,
    /// No frame is left, or none for a table.
    NoRoom,
    /// Anything else.
    Failed,
}

/// A device's table, and the frames that it holds.
#[derive(Debug)]
pub(crate) struct AssignedTable {
    memory: Memory,
    tables: AssignedTables,
    /// By first address: the range, and the page that its first one leads to.
    ranges: BTreeMap<Iova, (IovaRange, Gpa)>,
    /// Cleared and not yet settled: their frames stay.
    leaving: Vec<(IovaRange, Gpa)>,
}

impl AssignedTable {
    /// Nothing for `device`, which reaches nothing until it is attached.
    ///
    /// # Errors
    /// The host has no memory for the tables.
    pub(crate) fn new(hardware: &Arc<Hardware>, device: RequesterId) -> io::Result<Self> {
        Ok(Self {
            memory: Memory::on_demand(hardware.host(), HostPagePool::Off)?,
            tables: AssignedTables::new(hardware, &[device])?,
            ranges: BTreeMap::new(),
            leaving: Vec::new(),
        })
    }

    /// The device reaches what is mapped.
    pub(crate) fn attach(&self) {
        self.tables.attach();
    }

    /// When it returns, the device reaches nothing.
    pub(crate) fn detach(&self) {
        self.tables.detach();
    }

    /// When it returns, the device reaches nothing of the memory before.
    pub(crate) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.memory.set_memory(memory);
        self.tables.set_memory(memory);
    }

    /// `range` leads to the guest's memory from `to` on.
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

    /// A frame and an entry, or neither.
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

    /// The range that begins at `start` leads nowhere from the next [`commit`](Self::commit) on at
    /// the latest.
    pub(crate) fn unmap(&mut self, start: Iova) {
        if let Some((range, to)) = self.ranges.remove(&start) {
            self.clear(range, to);
        }
    }

    /// The same for all.
    pub(crate) fn unmap_all(&mut self) {
        for (range, to) in std::mem::take(&mut self.ranges).into_values() {
            self.clear(range, to);
        }
    }

    /// Maps what `memory` has beside `before`, each address to the page of the same number, and
    /// unmaps what it no longer has. What is mapped then.
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
            // What has no room, or is no whole page, is not there, and faults.
            let to = range.start().get();
            before.contains(range) || self.map(*range, to, Permissions::READ_WRITE).is_ok()
        });
        let _ = self.commit();
        now
    }

    fn clear(&mut self, range: IovaRange, to: Gpa) {
        for (iova, _) in pages(range, to) {
            // It is mapped, so that only memory that is not as it was written refuses.
            let _ = self.tables.unmap(ONLY, iova);
        }
        self.leaving.push((range, to));
    }

    /// When it returns `Ok`, the device does not reach what was unmapped, and no access through it
    /// is under way.
    ///
    /// # Errors
    /// It may, and its frames stay.
    pub(crate) fn commit(&mut self) -> Result<(), IoError> {
        self.tables.commit(ONLY)?;
        for (range, to) in self.leaving.drain(..) {
            for (_, gpa) in pages(range, to) {
                self.memory.unpin(gpa);
            }
        }
        self.memory.maintain();
        Ok(())
    }
}

/// The pages of `range`, and where each leads.
fn pages(range: IovaRange, to: Gpa) -> impl Iterator<Item = (Iova, Gpa)> {
    let count = range.bytes() / PAGE_BYTES;
    (0..count).map(move |page| {
        let offset = page * PAGE_BYTES;
        // Neither end wraps.
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
