//! The memory of a shadow pool, and its free slots.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ringfence_types::{Iova, IovaRange, Lock, MemoryError, Pfn, PhysAddr, PhysMemory, PhysRange};

use super::page::{BufferPart, Extent, Page, SlotKind};
use crate::copy::zero;
use crate::space::GRANULE;

/// Pages that a refill maps at a time, if the slots are not larger.
const RUN_PAGES: u32 = 16;
/// Pages of the free slots of one kind that a CPU takes from or returns to the pool at a time.
const BATCH_PAGES: u32 = 64;
/// Marks a pool without I/O virtual addresses. It lies beyond all page numbers, so no page has an
/// index in such a pool.
const NO_BASE: u64 = 1 << 63;

/// Free slots by kind: the index of the first page of each.
#[derive(Debug)]
pub(super) struct FreeSlots([Vec<u32>; SlotKind::LISTS]);

impl FreeSlots {
    pub(super) fn new() -> Self {
        Self([const { Vec::new() }; SlotKind::LISTS])
    }

    #[inline]
    pub(super) fn of(&mut self, kind: SlotKind) -> Option<&mut Vec<u32>> {
        self.0.get_mut(kind.list())
    }
}

/// Returns the number of slots of a kind that CPUs exchange with the pool at a time.
#[inline]
pub(super) fn batch(kind: SlotKind) -> usize {
    (BATCH_PAGES / kind.pages()).max(1) as usize
}

/// Returns the number of free slots of a kind that a CPU keeps at most.
#[inline]
pub(super) fn kept_at_most(kind: SlotKind) -> usize {
    (2 * BATCH_PAGES / kind.pages()).max(2) as usize
}

/// The part of a pool that CPUs share: free slots, and memory without slots.
#[derive(Debug)]
pub struct ShadowDepot {
    pub(super) free: FreeSlots,
    /// The first page without a slot.
    unused: u32,
    /// Runs below it that the table did not accept: the first page and the number of pages.
    refused: Vec<(u32, u32)>,
}

impl ShadowDepot {
    /// Takes pages without slots for slots of this kind. Returns the first page and the number of
    /// slots.
    pub(super) fn take_run(&mut self, kind: SlotKind, total: u32) -> Option<(u32, u32)> {
        let wanted = RUN_PAGES.max(kind.pages());
        let fits = |run: &(u32, u32)| run.1 >= kind.pages();
        if let Some(index) = self.refused.iter().position(fits) {
            let (first, pages) = self.refused.swap_remove(index);
            let slots = wanted.min(pages) / kind.pages();
            let used = slots.saturating_mul(kind.pages());
            if used < pages {
                let rest = first.saturating_add(used);
                self.refused.push((rest, pages.saturating_sub(used)));
            }
            return Some((first, slots));
        }
        let left = total.saturating_sub(self.unused);
        let slots = wanted.min(left) / kind.pages();
        let first = self.unused;
        self.unused = first.saturating_add(slots.saturating_mul(kind.pages()));
        (slots > 0).then_some((first, slots))
    }

    /// Returns the pages of a run that the table did not accept.
    pub(super) fn undo_run(&mut self, first: u32, pages: u32) {
        if self.unused == first.saturating_add(pages) {
            self.unused = first;
        } else {
            // Another CPU has taken a run since.
            self.refused.push((first, pages));
        }
    }
}

/// A slot of a pool: the index of its first page, and that page's state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot<'p> {
    pub(super) index: u32,
    pub(super) page: &'p Page,
}

/// Memory that one device reaches in place of its buffers.
///
/// The embedder provides the memory and gets it back when the space is dropped after its detach.
/// The pool divides it into slots of 1 to 4096 pages, each for one direction. A slot is mapped when
/// it is first needed, and stays mapped: the device keeps its access to the pages, which hold
/// copies for this device and nothing else.
#[derive(Debug)]
pub struct ShadowPool<L> {
    memory: PhysRange,
    pages: Vec<Page>,
    /// First page number of the pool in the I/O virtual address space.
    base: AtomicU64,
    /// Last page number; before the first map, the lowest that it can have.
    last: AtomicU64,
    /// Number of mapped pages.
    mapped: AtomicU32,
    pub(super) depot: L,
}

impl<L: Lock<ShadowDepot>> ShadowPool<L> {
    /// Creates a pool in `memory`. `lock` creates the embedder's lock. `None` if the memory is not
    /// aligned to pages or has 2^32 pages or more.
    pub fn new(memory: PhysRange, lock: impl FnOnce(ShadowDepot) -> L) -> Option<Self> {
        let pages = u32::try_from(memory.bytes() >> GRANULE.shift()).ok()?;
        let aligned = memory.start().is_aligned(GRANULE.bytes());
        if pages == 0 || !aligned || !memory.bytes().is_multiple_of(GRANULE.bytes()) {
            return None;
        }
        Some(Self {
            memory,
            pages: (0..pages).map(|_| Page::default()).collect(),
            base: AtomicU64::new(NO_BASE),
            last: AtomicU64::new(u64::from(pages.saturating_sub(1))),
            mapped: AtomicU32::new(0),
            depot: lock(ShadowDepot {
                free: FreeSlots::new(),
                unused: 0,
                refused: Vec::new(),
            }),
        })
    }
}

impl<L> ShadowPool<L> {
    /// Returns the memory of the pool, its bound.
    pub fn memory(&self) -> PhysRange {
        self.memory
    }

    /// Returns the bytes that the device reaches, which never decrease.
    pub fn mapped_bytes(&self) -> u64 {
        u64::from(self.mapped.load(Ordering::Relaxed)) << GRANULE.shift()
    }

    /// Returns the bytes of the slots that mappings use. Reads the state of every page.
    pub fn bytes_in_use(&self) -> u64 {
        let used = self.pages.iter().filter(|page| page.begins_copy());
        let pages = used.filter_map(|page| Some(u64::from(page.kind()?.pages())));
        pages.sum::<u64>() << GRANULE.shift()
    }

    /// Returns the number of pages.
    pub(super) fn total(&self) -> u32 {
        self.pages.len() as u32
    }

    pub(super) fn page(&self, index: u32) -> Option<&Page> {
        self.pages.get(index as usize)
    }

    /// Returns the physical address of a page.
    #[inline]
    pub(super) fn address(&self, index: u32) -> PhysAddr {
        self.memory
            .start()
            .wrapping_add(u64::from(index) << GRANULE.shift())
    }

    /// Returns the first page of the pool in the I/O virtual address space; `None` before the first
    /// map.
    #[inline]
    pub(super) fn base(&self) -> Option<Iova> {
        let page = self.base.load(Ordering::Relaxed);
        (page != NO_BASE).then_some(Iova::new(page << GRANULE.shift()))
    }

    pub(super) fn set_base(&self, base: Iova) {
        let page = base.get() >> GRANULE.shift();
        let pages = u64::from(self.total());
        self.last
            .store(page.wrapping_add(pages.wrapping_sub(1)), Ordering::Relaxed);
        self.base.store(page, Ordering::Relaxed);
    }

    /// Returns true if a device with this mask reaches the whole pool.
    #[inline]
    pub(super) fn lies_within(&self, mask: Pfn) -> bool {
        self.last.load(Ordering::Relaxed) <= mask.get()
    }

    /// Returns the page that contains `iova`, which may be the first one of a slot; `None` for
    /// addresses outside the pool.
    #[inline]
    pub(super) fn slot_at(&self, iova: Iova) -> Option<Slot<'_>> {
        let page = iova.get() >> GRANULE.shift();
        let index = page.wrapping_sub(self.base.load(Ordering::Relaxed));
        let page = self.pages.get(usize::try_from(index).ok()?)?;
        Some(Slot {
            index: index as u32,
            page,
        })
    }

    /// Returns the I/O virtual address of byte `offset` of the page at `index`.
    #[inline]
    pub(super) fn iova_of(&self, index: u32, offset: u64) -> Option<Iova> {
        let page = self
            .base()?
            .wrapping_add(u64::from(index) << GRANULE.shift());
        Some(page.wrapping_add(offset))
    }

    /// Turns the pages of a new run into slots, and zeroes them. The device does not reach them
    /// yet.
    pub(super) fn prepare_run(
        &self,
        memory: &impl PhysMemory,
        kind: SlotKind,
        first: u32,
        slots: u32,
    ) -> Result<(), MemoryError> {
        let pages = slots.saturating_mul(kind.pages());
        zero(
            memory,
            self.address(first),
            u64::from(pages) << GRANULE.shift(),
        )?;
        for slot in 0..slots {
            let index = first.saturating_add(slot.saturating_mul(kind.pages()));
            if let Some(page) = self.page(index) {
                page.set_kind(kind);
            }
        }
        Ok(())
    }

    /// Counts the pages of a run that the table has accepted.
    pub(super) fn count_run(&self, pages: u32) {
        self.mapped.fetch_add(pages, Ordering::Relaxed);
    }

    /// Returns the part of a piece that lies in `part`, of a mapping in the pool.
    pub(super) fn overlap(&self, index: u32, piece: &BufferPart, part: IovaRange) -> Extent {
        match self.iova_of(index, piece.offset()) {
            Some(start) => piece.overlap(start, part),
            None => Extent::default(),
        }
    }

    /// Returns the memory that the device reaches at `range` of the pool.
    pub(super) fn shadow(&self, range: IovaRange) -> Option<PhysRange> {
        let slot = self.slot_at(range.start())?;
        let offset = range.start().offset_in(GRANULE.bytes());
        PhysRange::new(self.address(slot.index).wrapping_add(offset), range.bytes())
    }

    /// Returns true if a mapping uses a slot. Reads the state of every page.
    pub(super) fn is_in_use(&self) -> bool {
        self.pages.iter().any(Page::begins_copy)
    }
}
