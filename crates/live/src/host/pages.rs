//! The guest's memory as its client shares it: its pages, and optionally which pages are locked
//! into host memory.
//!
//! The host may reclaim unlocked pages while the guest runs. It cannot reclaim a locked page, which
//! a device can access (PV10, attack A32).

use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence_pviommu::backend::{GuestBacking, PinError, Resident};
use ringfence_pviommu::wire::{Gpa, PAGE_BYTES};
use ringfence_types::{AddressRange, PhysAddr};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::counters::DeviceCounters;
use crate::memory::lock::{lock, unlock};

/// The guest's pages. All of them are mapped in this process, so the frame address of a page is its
/// guest-physical address.
#[derive(Debug)]
pub(super) struct GuestPages {
    resident: Resident,
    locked: Option<LockedPages>,
}

/// Pages locked into host memory.
#[derive(Debug)]
struct LockedPages {
    memory: GuestMemoryMmap,
    /// Pin count of each page.
    pins: BTreeMap<u64, u32>,
    counters: Arc<DeviceCounters>,
}

impl GuestPages {
    /// Creates an empty set of pages.
    pub(super) fn new() -> Self {
        Self {
            resident: Resident::new(Vec::new()),
            locked: None,
        }
    }

    /// Locks pages that are pinned from now on. No page may be pinned yet.
    pub(super) fn lock(&mut self, counters: Arc<DeviceCounters>) {
        self.locked = Some(LockedPages {
            memory: GuestMemoryMmap::default(),
            pins: BTreeMap::new(),
            counters,
        });
    }

    /// Replaces the guest's memory. Locks the pinned pages that exist in the new one, as far as the
    /// host allows.
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        let ranges = memory.iter().filter_map(|region| {
            let start = Gpa::new(region.start_addr().raw_value());
            AddressRange::new(start, region.len())
        });
        self.resident = Resident::new(ranges.collect());
        if let Some(locked) = &mut self.locked {
            locked.memory = memory.clone();
            for page in locked.pins.keys() {
                // No device can access a missing page. If the host cannot lock a page, access is
                // only slower.
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
            // The page still exists, or its mapping and lock are gone together.
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

    /// Returns the KiB that this process has locked; no other test here locks memory.
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
        // The client shares other memory at the same address: the pinned pages are locked there.
        frames.set_memory(&memory(0x10_000, 8));
        assert_eq!(locked_kib(), 8);
        // One of the two pages is missing in this memory.
        frames.set_memory(&memory(0x13_000, 2));
        assert_eq!(locked_kib(), 4);
        frames.unpin(page);
        assert_eq!(locked_kib(), 4);
        frames.unpin(other);
        assert_eq!(locked_kib(), 0);
        assert_eq!((counters.locked.get(), counters.unlocked.get()), (2, 2));
        // An excess unpin changes nothing.
        frames.unpin(other);
        assert_eq!(counters.unlocked.get(), 2);
        assert_eq!(frames.pin(page), Err(PinError::NotMemory));
        // A guest page that spans two host pages cannot be locked without its neighbours.
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
