//! The guest's memory as its client shares it: its pages, and optionally which pages are locked
//! into host memory.
//!
//! The host may reclaim unlocked pages while the guest runs. It cannot reclaim a locked page, which
//! a device can access (PV10, attack A32).

use std::collections::BTreeMap;
use std::io;
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

    /// Locks the pinned pages that exist in `memory`. No device can access a missing page.
    ///
    /// # Errors
    /// The host cannot lock one of them. Pages of new ranges may be locked until the caller drops
    /// `memory`.
    pub(super) fn lock_pinned(&self, memory: &GuestMemoryMmap) -> io::Result<()> {
        let Some(locked) = &self.locked else {
            return Ok(());
        };
        for region in memory.iter() {
            let first = Gpa::new(region.start_addr().raw_value()).align_down(PAGE_BYTES);
            let last = region.last_addr().raw_value();
            for (page, _) in locked.pins.range(first.get()..=last) {
                lock(memory, *page, PAGE_BYTES)?;
            }
        }
        Ok(())
    }

    /// Replaces the guest's memory. If it has a new range, the caller has locked the pinned pages
    /// in it ([`lock_pinned`](Self::lock_pinned)).
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        let ranges = memory.iter().filter_map(|region| {
            let start = Gpa::new(region.start_addr().raw_value());
            AddressRange::new(start, region.len())
        });
        self.resident = Resident::new(ranges.collect());
        if let Some(locked) = &mut self.locked {
            locked.memory = memory.clone();
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
    use std::sync::{Mutex, PoisonError};

    use vm_memory::GuestAddress;

    use super::*;

    /// Held by each test that locks memory: [`locked_kib`] counts the whole process.
    static LOCKING: Mutex<()> = Mutex::new(());

    /// Returns the KiB that this process has locked.
    fn locked_kib() -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
        let words = line.unwrap().split_whitespace().next();
        words.unwrap().parse().unwrap()
    }

    fn memory(start: u64, pages: usize) -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(start), pages << 12)]).unwrap()
    }

    /// Replaces the memory as a session does when its client maps a range.
    fn share(frames: &mut GuestPages, memory: &GuestMemoryMmap) -> io::Result<()> {
        frames.lock_pinned(memory)?;
        frames.set_memory(memory);
        Ok(())
    }

    #[test]
    fn a_page_is_locked_as_long_as_it_is_pinned_anywhere() {
        let _locking = LOCKING.lock().unwrap_or_else(PoisonError::into_inner);
        let counters = Arc::new(DeviceCounters::default());
        let mut frames = GuestPages::new();
        frames.lock(Arc::clone(&counters));
        share(&mut frames, &memory(0x10_000, 8)).unwrap();
        let (page, other) = (Gpa::new(0x12_000), Gpa::new(0x13_000));
        assert_eq!(frames.pin(page), Ok(PhysAddr::new(0x12_000)));
        assert_eq!(locked_kib(), 4);
        assert_eq!(frames.pin(page), Ok(PhysAddr::new(0x12_000)));
        assert_eq!(frames.pin(other), Ok(PhysAddr::new(0x13_000)));
        assert_eq!(locked_kib(), 8);
        frames.unpin(page);
        assert_eq!(locked_kib(), 8);
        // The client shares other memory at the same address: the pinned pages are locked there.
        share(&mut frames, &memory(0x10_000, 8)).unwrap();
        assert_eq!(locked_kib(), 8);
        // One of the two pages is missing in this memory.
        share(&mut frames, &memory(0x13_000, 2)).unwrap();
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
        share(&mut frames, &memory(0x10_800, 8)).unwrap();
        assert_eq!(frames.pin(page), Err(PinError::NoRoom));
        assert_eq!(locked_kib(), 0);
    }

    /// A page that spans two host pages cannot be locked without its neighbours.
    #[test]
    fn a_pinned_page_that_cannot_be_locked_is_an_error() {
        let _locking = LOCKING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut frames = GuestPages::new();
        frames.lock(Arc::default());
        frames.set_memory(&memory(0x1_0000, 2));
        let page = Gpa::new(0x1_1000);
        // No page is pinned yet.
        frames.lock_pinned(&memory(0x1_0800, 2)).unwrap();
        frames.pin(page).unwrap();
        for (start, bytes) in [(0x1_0800, 0x2000), (0x1_0000, 0x1800), (0x1_1800, 0x1000)] {
            let ranges = [(GuestAddress(start), bytes)];
            let part = GuestMemoryMmap::from_ranges(&ranges).unwrap();
            assert!(frames.lock_pinned(&part).is_err(), "{start:#x}");
        }
        frames.lock_pinned(&memory(0x1_2000, 2)).unwrap();
        frames.unpin(page);
        frames.lock_pinned(&memory(0x1_0800, 2)).unwrap();
    }

    #[test]
    fn pages_are_locked_only_on_request() {
        let mut frames = GuestPages::new();
        frames.set_memory(&memory(0, 4));
        assert_eq!(frames.pin(Gpa::new(0x1000)), Ok(PhysAddr::new(0x1000)));
        frames.unpin(Gpa::new(0x1000));
    }
}
