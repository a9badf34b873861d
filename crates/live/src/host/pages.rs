//! The guest's memory as its client shares it: which pages there are, and which of them are locked
//! into the host's memory, if that was asked for.
//!
//! The host takes back what it likes of the rest, while the guest runs; it is refused a page that a
//! device reaches (PV10, attack A32).

use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence_pviommu::backend::{GuestBacking, PinError, Resident};
use ringfence_pviommu::wire::{Gpa, PAGE_BYTES};
use ringfence_types::{AddressRange, PhysAddr};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::counters::DeviceCounters;
use crate::memory::lock::{lock, unlock};

/// All of it is mapped in this process, so that where a page lies is its own address.
#[derive(Debug)]
pub(super) struct GuestPages {
    resident: Resident,
    locked: Option<LockedPages>,
}

/// Pages that are kept.
#[derive(Debug)]
struct LockedPages {
    memory: GuestMemoryMmap,
    /// How often each is pinned.
    pins: BTreeMap<u64, u32>,
    counters: Arc<DeviceCounters>,
}

impl GuestPages {
    /// No memory yet.
    pub(super) fn new() -> Self {
        Self {
            resident: Resident::new(Vec::new()),
            locked: None,
        }
    }

    /// From now on what is pinned is locked. Nothing is pinned yet.
    pub(super) fn lock(&mut self, counters: Arc<DeviceCounters>) {
        self.locked = Some(LockedPages {
            memory: GuestMemoryMmap::default(),
            pins: BTreeMap::new(),
            counters,
        });
    }

    /// The memory is another one; what is pinned is locked there, as far as it is there.
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        let ranges = memory.iter().filter_map(|region| {
            let start = Gpa::new(region.start_addr().raw_value());
            AddressRange::new(start, region.len())
        });
        self.resident = Resident::new(ranges.collect());
        if let Some(locked) = &mut self.locked {
            locked.memory = memory.clone();
            for page in locked.pins.keys() {
                // A page that is not there is reached by nobody; one that the host has no room for
                // is only slower.
                let _ = lock(memory, *page, PAGE_BYTES);
            }
        }
    }
}

impl LockedPages {
    fn pin(&mut self, page: u64) -> Result<(), PinError> {
        let pins = self.pins.get(&page).copied().unwrap_or(0);
        let more = pins.checked_add(1).ok_or(PinError::NoRoom)?;
        if pins == 0 {
            lock(&self.memory, page, PAGE_BYTES).map_err(|_| PinError::NoRoom)?;
            self.counters.locked.add(1);
        }
        self.pins.insert(page, more);
        Ok(())
    }

    fn unpin(&mut self, page: u64) {
        let Some(pins) = self.pins.get_mut(&page) else {
            return;
        };
        *pins -= 1;
        if *pins == 0 {
            self.pins.remove(&page);
            // It is there still, or its mapping has gone and the lock with it.
            let _ = unlock(&self.memory, page, PAGE_BYTES);
            self.counters.unlocked.add(1);
        }
    }
}

impl GuestBacking for GuestPages {
    fn contains(&self, page: Gpa) -> bool {
        self.resident.contains(page)
    }

    fn pin(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        let frame = self.resident.pin(page)?;
        if let Some(locked) = &mut self.locked {
            locked.pin(page.get())?;
        }
        Ok(frame)
    }

    fn unpin(&mut self, page: Gpa) {
        if let Some(locked) = &mut self.locked {
            locked.unpin(page.get());
        }
        self.resident.unpin(page);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use vm_memory::GuestAddress;

    use super::*;

    /// KiB that this process has locked; nothing else in these tests locks any.
    fn locked_kib() -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
        let words = line.unwrap().split_whitespace().next();
        words.unwrap().parse().unwrap()
    }

    fn memory(start: u64, pages: usize) -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(start), pages << 12)]).unwrap()
    }

    #[test]
    fn a_page_is_locked_as_long_as_it_is_pinned_anywhere() {
        let counters = Arc::new(DeviceCounters::default());
        let mut frames = GuestPages::new();
        frames.lock(Arc::clone(&counters));
        frames.set_memory(&memory(0x10_000, 8));
        let (page, other) = (Gpa::new(0x12_000), Gpa::new(0x13_000));
        assert_eq!(frames.pin(page), Ok(PhysAddr::new(0x12_000)));
        assert_eq!(locked_kib(), 4);
        assert_eq!(frames.pin(page), Ok(PhysAddr::new(0x12_000)));
        assert_eq!(frames.pin(other), Ok(PhysAddr::new(0x13_000)));
        assert_eq!(locked_kib(), 8);
        frames.unpin(page);
        assert_eq!(locked_kib(), 8);
        // The client shares other memory at the same place: what is pinned is locked there.
        frames.set_memory(&memory(0x10_000, 8));
        assert_eq!(locked_kib(), 8);
        // And memory where one of the two is not.
        frames.set_memory(&memory(0x13_000, 2));
        assert_eq!(locked_kib(), 4);
        frames.unpin(page);
        assert_eq!(locked_kib(), 4);
        frames.unpin(other);
        assert_eq!(locked_kib(), 0);
        assert_eq!((counters.locked.get(), counters.unlocked.get()), (2, 2));
        // One too many takes nothing.
        frames.unpin(other);
        assert_eq!(counters.unlocked.get(), 2);
        assert_eq!(frames.pin(page), Err(PinError::NotMemory));
        // A page across two of the host's would share its fate with its neighbours.
        frames.set_memory(&memory(0x10_800, 8));
        assert_eq!(frames.pin(page), Err(PinError::NoRoom));
        assert_eq!(locked_kib(), 0);
    }

    #[test]
    fn nothing_is_locked_unless_asked_for() {
        let mut frames = GuestPages::new();
        frames.set_memory(&memory(0, 4));
        assert_eq!(frames.pin(Gpa::new(0x1000)), Ok(PhysAddr::new(0x1000)));
        frames.unpin(Gpa::new(0x1000));
    }
}
