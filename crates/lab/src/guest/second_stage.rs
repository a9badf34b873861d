//! Guest memory on the host of the para-virtual IOMMU: frames on demand behind a second stage. The
//! host walks the second stage in memory for each page of a map (PVIOMMU sections 4.1 and 4.6;
//! decision 0019).
//!
//! Only the guest's CPUs use the second stage: devices do not walk it, and its tables do not count
//! as tables of a mode. A replay moves no bytes, so frames are mere addresses, outside those of the
//! guest's pages.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Levels, SecondStage};
use ringfence_pviommu::backend::{FixedLastTable, OnDemand, Pager};
use ringfence_pviommu::wire::{Gpa, PAGE_BYTES};
use ringfence_types::{
    AddressRange, DomainId, Fault, FrameSource, OutOfFrames, PhysAddr, PhysMemory, PhysRange,
};

use super::LookupStats;
use crate::error::LabError;
use crate::replay_platform::MEMORY_BYTES;

/// Address of the first frame, above all guest memory.
const FIRST_FRAME: u64 = 1 << 40;
/// Address space for the second stage's own tables: enough to map all guest memory.
const TABLE_BYTES: u64 = 2 << 30;
/// Table frames that are touched in advance, so that page faults of this process do not count as
/// work of the host.
const WARM_FRAMES: u64 = 16;
/// Flag in the address of memory that a device reaches outside all guest pages.
const NO_PAGE: u64 = 1 << 63;
/// Domain tag of the second stage in the guest CPUs' TLBs; unused in a replay.
const SECOND_STAGE_DOMAIN: DomainId = DomainId::new(1);

/// The way in which a host finds the frame of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameLookup {
    /// By a walk. The host allocates a frame when a page needs one.
    Plain,
    /// With the pool of 256 frames and the pointer to the last table.
    Optimised,
}

/// Frames for a guest: addresses, lowest first.
#[derive(Debug, Default)]
pub(super) struct GuestFrames {
    fresh: Cell<u64>,
    free: RefCell<Vec<PhysAddr>>,
}

/// A frame source of the host.
#[derive(Debug, Clone)]
pub(super) enum HostFrames {
    /// Frames for tables.
    Tables(Rc<Frames<Rc<Arena>>>),
    /// Frames for the guest.
    Guest(Rc<GuestFrames>),
}

impl FrameSource for HostFrames {
    #[inline]
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        match self {
            Self::Tables(frames) => frames.alloc_zeroed(),
            Self::Guest(frames) => Ok(frames.free.borrow_mut().pop().unwrap_or_else(|| {
                let number = frames.fresh.get();
                frames.fresh.set(number + 1);
                PhysAddr::new(FIRST_FRAME + number * PAGE_BYTES)
            })),
        }
    }

    fn free(&self, frame: PhysAddr) {
        match self {
            Self::Tables(frames) => frames.free(frame),
            Self::Guest(frames) => frames.free.borrow_mut().push(frame),
        }
    }
}

/// Maps frames to guest pages. The host records an entry when a page gets its frame, so the map is
/// independent of the second stage and of pointers into it. The oracle relies on it.
#[derive(Debug, Default)]
pub struct FrameRmap {
    /// Guest page addresses by frame number.
    pages: RefCell<Vec<u64>>,
    /// Reused storage for `with_guest_ranges`.
    buffer: RefCell<Vec<PhysRange>>,
}

impl FrameRmap {
    /// Returns the guest address of the byte at `at`. For memory outside all guest pages, returns
    /// an address above all guest memory.
    fn guest_address(&self, at: PhysAddr) -> PhysAddr {
        let number = at.get().checked_sub(FIRST_FRAME).map(|at| at / PAGE_BYTES);
        let pages = self.pages.borrow();
        let page = number.and_then(|number| pages.get(usize::try_from(number).ok()?));
        match page {
            Some(page) if *page != NO_PAGE => PhysAddr::new(page | at.offset_in(PAGE_BYTES)),
            _ => PhysAddr::new(at.get() | NO_PAGE),
        }
    }

    /// Calls `look` with `ranges` in guest addresses.
    fn with_guest_ranges(&self, ranges: &[PhysRange], look: impl FnOnce(&[PhysRange])) {
        let mut told = self.buffer.take();
        told.clear();
        for range in ranges {
            let (mut at, mut left) = (range.start(), range.bytes());
            while left > 0 {
                let here = left.min(PAGE_BYTES - at.offset_in(PAGE_BYTES));
                let start = self.guest_address(at);
                let joined = told.last_mut().filter(|last: &&mut PhysRange| {
                    last.start().wrapping_add(last.bytes()) == start
                });
                match joined {
                    Some(last) => {
                        let both = PhysRange::new(last.start(), last.bytes() + here);
                        *last = both.unwrap_or(*last);
                    }
                    None => told.extend(PhysRange::new(start, here)),
                }
                at = at.wrapping_add(here);
                left -= here;
            }
        }
        look(&told);
        self.buffer.replace(told);
    }
}

/// Records the frames of guest pages in a [`FrameRmap`].
#[derive(Debug)]
pub(super) struct RmapRecorder(Rc<FrameRmap>);

impl Pager for RmapRecorder {
    fn load(&mut self, page: Gpa, frame: PhysAddr) {
        let number = (frame.get().saturating_sub(FIRST_FRAME) / PAGE_BYTES) as usize;
        let mut pages = self.0.pages.borrow_mut();
        if pages.len() <= number {
            pages.resize(number + 1, NO_PAGE);
        }
        pages[number] = page.get();
    }
}

/// Reports device accesses by guest address, because mappings contain guest addresses.
pub(super) struct GuestAddressObserver<O> {
    /// `None` if guest addresses equal physical ones.
    pub(super) rmap: Option<Rc<FrameRmap>>,
    pub(super) observer: O,
}

impl<O: Observer> Observer for GuestAddressObserver<O> {
    #[inline]
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]) {
        match &self.rmap {
            Some(occupants) => {
                occupants
                    .with_guest_ranges(ranges, |ranges| self.observer.allowed(request, ranges));
            }
            None => self.observer.allowed(request, ranges),
        }
    }

    #[inline]
    fn faulted(&mut self, request: &DmaRequest, fault: &Fault) {
        self.observer.faulted(request, fault);
    }
}

/// All memory of a guest.
pub(super) type GuestMemory = OnDemand<Rc<Arena>, HostFrames, Option<FixedLastTable>, RmapRecorder>;

/// Creates all memory of a guest, without frames.
///
/// # Errors
/// Memory is short.
pub(super) fn guest_memory(
    side: FrameLookup,
    occupants: &Rc<FrameRmap>,
) -> Result<GuestMemory, LabError> {
    let wrong = LabError::Internal("a guest's memory");
    let arena = Rc::new(Arena::new(TABLE_BYTES)?);
    for page in 0..=WARM_FRAMES {
        if let Ok(word) = arena.word(PhysAddr::new(page * PAGE_BYTES)) {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let region = PhysRange::new(PhysAddr::new(PAGE_BYTES), TABLE_BYTES - PAGE_BYTES);
    // The guest's coherent memory uses the addresses of the platform's table region.
    let all = AddressRange::new(Gpa::new(0), MEMORY_BYTES);
    let (Some(region), Some(all)) = (region, all) else {
        return Err(wrong);
    };
    let tables = HostFrames::Tables(Rc::new(Frames::new(Rc::clone(&arena), region)));
    let pointer = match side {
        FrameLookup::Plain => None,
        FrameLookup::Optimised => Some(FixedLastTable::default()),
    };
    let memory = OnDemand::new(
        arena,
        tables,
        HostFrames::Guest(Rc::default()),
        SecondStage::new(Levels::Four),
        SECOND_STAGE_DOMAIN,
        &[all],
        pointer,
        RmapRecorder(Rc::clone(occupants)),
    );
    let memory = memory.map_err(|_| wrong)?;
    Ok(match side {
        FrameLookup::Plain => memory.without_pool(),
        FrameLookup::Optimised => memory,
    })
}

/// Returns the counters of frame lookups.
pub(super) fn lookups(memory: &GuestMemory) -> LookupStats {
    let stats = memory.stats();
    LookupStats {
        walks: stats.walks,
        through_pointer: stats.last_table_hits,
        reads: stats.reads,
        frames: stats.allocated,
        frames_awaited: memory.pool().stats().from_host,
    }
}

#[cfg(test)]
mod tests {
    use ringfence_pviommu::backend::GuestBacking;

    use super::*;

    #[test]
    fn violations_name_guest_addresses() {
        for side in [FrameLookup::Plain, FrameLookup::Optimised] {
            let occupants = Rc::new(FrameRmap::default());
            let mut memory = guest_memory(side, &occupants).unwrap();
            // Two adjacent pages whose frames are not adjacent: another page gets the frame in
            // between.
            let pages = [0x5000, 0x9000, 0x6000];
            let frames = pages.map(|page| memory.pin(Gpa::new(page)).unwrap());
            assert!(frames.iter().all(|frame| frame.get() >= FIRST_FRAME));
            let heard = |ranges: &[PhysRange]| {
                let mut heard = Vec::new();
                occupants.with_guest_ranges(ranges, |told| heard = told.to_vec());
                heard
            };
            let range = |at: u64, bytes| PhysRange::new(PhysAddr::new(at), bytes).unwrap();
            let both = [
                range(frames[0].get() + 4000, 96),
                range(frames[2].get(), 100),
            ];
            assert_eq!(heard(&both), [range(0x5fa0, 196)], "{side:?}");
            // Three adjacent frames are no guest range.
            let apart: Vec<_> = frames
                .iter()
                .map(|frame| range(frame.get(), PAGE_BYTES))
                .collect();
            let named = pages.map(|page| range(page, PAGE_BYTES));
            assert_eq!(heard(&apart), named, "{side:?}");
            // A frame of the pool without a page, and memory outside the frames.
            let unused = frames.iter().map(|frame| frame.get()).max().unwrap() + PAGE_BYTES;
            for at in [unused, 0x5000, 1 << 50] {
                assert_eq!(heard(&[range(at, 8)]), [range(at | NO_PAGE, 8)], "{side:?}");
            }
        }
    }

    #[test]
    fn a_host_with_both_waits_for_no_frame_and_reads_less() {
        let counted = |side| {
            let mut memory = guest_memory(side, &Rc::default()).unwrap();
            for page in (0..1024).chain(0..1024) {
                memory.pin(Gpa::new(page * PAGE_BYTES)).unwrap();
                memory.maintain();
            }
            lookups(&memory)
        };
        let (plain, optimised) = (counted(FrameLookup::Plain), counted(FrameLookup::Optimised));
        // The first walk of each of the two tables needs one more.
        assert_eq!((plain.walks, plain.through_pointer), (2048 + 2, 0));
        assert_eq!((plain.frames, plain.frames_awaited), (1024, 1024));
        assert_eq!((optimised.walks, optimised.through_pointer), (6, 2044));
        assert_eq!((optimised.frames, optimised.frames_awaited), (1024, 0));
        assert!(optimised.reads * 3 < plain.reads);
    }
}
