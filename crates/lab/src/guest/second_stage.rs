//! A guest's memory as the para-virtual IOMMU's host keeps it: frames on demand behind a second
//! stage, which is walked in memory for each page that is mapped (PVIOMMU sections 4.1 and 4.6;
//! decision 0019).
//!
//! The second stage is its processors', so no device's walk reads it, and its tables are not among
//! those of a mode. Frames hold nothing, for no byte moves in a replay: they are addresses that no
//! page of the guest has.

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

use super::queue::LookupStats;
use crate::error::LabError;
use crate::platform::MEMORY_BYTES;

/// The first frame: above all memory that a guest has.
const FIRST_FRAME: u64 = 1 << 40;
/// Addresses for the second stage's own tables: enough to map all of a guest's memory.
const TABLE_BYTES: u64 = 2 << 30;
/// Frames of it touched beforehand, so that no page fault of this process is taken for the host's
/// work.
const WARM_FRAMES: u64 = 16;
/// Set in the address of what devices reach and no page of the guest holds.
const NO_PAGE: u64 = 1 << 63;
/// What the guest's processors cache of the second stage is tagged with; nobody asks here.
const SECOND_STAGE_DOMAIN: DomainId = DomainId::new(1);

/// How a host finds the frame of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameLookup {
    /// By a walk; it asks for a frame when a page wants one.
    Plain,
    /// With the pool of 256 frames, and the pointer to the last table.
    Optimised,
}

/// Frames for a guest: addresses, the lowest first.
#[derive(Debug, Default)]
pub(super) struct GuestFrames {
    fresh: Cell<u64>,
    free: RefCell<Vec<PhysAddr>>,
}

/// The host's frames.
#[derive(Debug, Clone)]
pub(super) enum HostFrames {
    /// For tables.
    Tables(Rc<Frames<Rc<Arena>>>),
    /// For the guest.
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

/// Which page of the guest is in which frame, noted when the page gets it: what a judge believes,
/// whatever the second stage or a pointer into it say.
#[derive(Debug, Default)]
pub struct FrameRmap {
    /// By number of the frame; addresses of pages.
    pages: RefCell<Vec<u64>>,
    /// Storage.
    buffer: RefCell<Vec<PhysRange>>,
}

impl FrameRmap {
    /// The guest's address of the byte at `at`; what is in no page of its memory is beyond all of
    /// it.
    fn guest_address(&self, at: PhysAddr) -> PhysAddr {
        let number = at.get().checked_sub(FIRST_FRAME).map(|at| at / PAGE_BYTES);
        let pages = self.pages.borrow();
        let page = number.and_then(|number| pages.get(usize::try_from(number).ok()?));
        match page {
            Some(page) if *page != NO_PAGE => PhysAddr::new(page | at.offset_in(PAGE_BYTES)),
            _ => PhysAddr::new(at.get() | NO_PAGE),
        }
    }

    /// Tells `look` of `ranges` by the guest's addresses.
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

/// Notes for a guest's memory who gets which frame.
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

/// Sees what devices reach by the guest's addresses, which are those of its mappings.
pub(super) struct GuestAddressObserver<O> {
    /// None where the guest's addresses are the machine's.
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

/// All memory of a guest, without a frame yet.
///
/// # Errors
/// No room.
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
    // Coherent memory of the guest has the addresses at which the machine has tables.
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

/// What was done to find the frames of pages.
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
    fn what_is_reached_is_told_by_the_guests_addresses() {
        for side in [FrameLookup::Plain, FrameLookup::Optimised] {
            let occupants = Rc::new(FrameRmap::default());
            let mut memory = guest_memory(side, &occupants).unwrap();
            // Neighbours that get their frames apart, and a stranger in between.
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
            // All three frames in a row are no range of the guest's.
            let apart: Vec<_> = frames
                .iter()
                .map(|frame| range(frame.get(), PAGE_BYTES))
                .collect();
            let named = pages.map(|page| range(page, PAGE_BYTES));
            assert_eq!(heard(&apart), named, "{side:?}");
            // A frame of the pool, which no page has, and memory that is no frame.
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
        // A page more for each of the two tables, which the first walk does not find.
        assert_eq!((plain.walks, plain.through_pointer), (2048 + 2, 0));
        assert_eq!((plain.frames, plain.frames_awaited), (1024, 1024));
        assert_eq!((optimised.walks, optimised.through_pointer), (6, 2044));
        assert_eq!((optimised.frames, optimised.frames_awaited), (1024, 0));
        assert!(optimised.reads * 3 < plain.reads);
    }
}
