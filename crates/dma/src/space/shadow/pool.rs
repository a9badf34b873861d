//! The memory of a shadow pool, and its free slots.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ringfence_types::{Iova, IovaRange, Lock, MemoryError, PhysAddr, PhysMemory, PhysRange};

use super::page::{Extent, ORDERS, Page, Piece, SlotKind};
use crate::copy::{check, zero};
use crate::error::UnmapRefusal;
use crate::space::GRANULE;

/// Pages that a refill maps at a time, if the slots are not larger.
const RUN_PAGES: u32 = 16;
/// Pages of the free slots of one kind that a CPU takes from or returns to the pool at a time.
const BATCH_PAGES: u32 = 64;
/// Number of kinds of slots.
const KINDS: usize = SlotKind::PERMISSIONS * ORDERS;
/// Marks a pool without I/O virtual addresses.
const NO_BASE: u64 = u64::MAX;

/// Free slots by kind: the index of the first page of each.
#[derive(Debug)]
pub(super) struct FreeSlots([Vec<u32>; KINDS]);

impl FreeSlots {
    pub(super) fn new() -> Self {
        Self([const { Vec::new() }; KINDS])
    }

    #[inline]
    pub(super) fn of(&mut self, kind: SlotKind) -> Option<&mut Vec<u32>> {
        self.0.get_mut(kind.list())
    }
}

/// Returns the number of slots of a kind that CPUs exchange with the pool at a time.
pub(super) fn batch(kind: SlotKind) -> usize {
    (BATCH_PAGES / kind.pages()).max(1) as usize
}

/// The part of a pool that CPUs share: free slots, and memory without slots.
#[derive(Debug)]
pub struct ShadowDepot {
    pub(super) free: FreeSlots,
    /// The first page without a slot.
    unused: u32,
}

impl ShadowDepot {
    /// Takes pages without slots for slots of this kind. Returns the first page and the number of
    /// slots.
    pub(super) fn take_run(&mut self, kind: SlotKind, total: u32) -> Option<(u32, u32)> {
        let left = total.saturating_sub(self.unused);
        let slots = RUN_PAGES.max(kind.pages()).min(left) / kind.pages();
        let first = self.unused;
        self.unused = first.saturating_add(slots.saturating_mul(kind.pages()));
        (slots > 0).then_some((first, slots))
    }

    /// Returns the pages of a run that the table did not accept.
    pub(super) fn undo_run(&mut self, first: u32, pages: u32) {
        if self.unused == first.saturating_add(pages) {
            self.unused = first;
        }
    }
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
            mapped: AtomicU32::new(0),
            depot: lock(ShadowDepot {
                free: FreeSlots::new(),
                unused: 0,
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
        self.base.store(page, Ordering::Relaxed);
    }

    /// Returns the index of the page at `iova`; `None` for addresses outside the pool.
    #[inline]
    pub(super) fn index(&self, iova: Iova) -> Option<u32> {
        let offset = iova.get().checked_sub(self.base()?.get())?;
        let index = offset >> GRANULE.shift();
        (index < self.pages.len() as u64).then_some(index as u32)
    }

    /// Returns the bytes of the I/O virtual address space from `start` in page `index` to the last
    /// byte of a piece.
    #[inline]
    fn iova_of(&self, index: u32, offset: u64) -> Option<Iova> {
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

    /// Records `pieces` in the slot at `slot`, each at its offset in its first page. If `copies` is
    /// true, copies their bytes and zeroes all bytes of earlier buffers. That includes slots that
    /// the device only writes: not every table has write-only pages. Returns the range of the
    /// mapping.
    ///
    /// # Errors
    /// A piece lies outside memory. The slot is free.
    #[inline]
    pub(super) fn fill(
        &self,
        memory: &impl PhysMemory,
        slot: u32,
        kind: SlotKind,
        pieces: &[PhysRange],
        copies: bool,
    ) -> Result<Option<IovaRange>, MemoryError> {
        let mut index = slot;
        let mut last = None;
        for (number, original) in pieces.iter().enumerate() {
            let piece = Piece {
                original: *original,
                more: number.saturating_add(1) < pieces.len(),
            };
            let (start, bytes) = (original.start(), original.bytes());
            let shadow = self.address(index).wrapping_add(piece.offset());
            let filled = if copies {
                memory.copy_bytes(start, shadow, bytes)
            } else {
                check(memory, start, bytes)
            };
            if let Err(error) = filled {
                self.empty(memory, slot, kind, copies);
                return Err(error);
            }
            if let Some(page) = self.page(index) {
                page.put(*original, number == 0, piece.more);
            }
            last = self.iova_of(index, piece.offset().wrapping_add(bytes.wrapping_sub(1)));
            if copies {
                self.scrub(memory, index, piece.pages(), piece.offset(), bytes)?;
            }
            index = index.saturating_add(piece.pages());
        }
        if copies {
            let end = slot.saturating_add(kind.pages());
            self.scrub(memory, index, end.saturating_sub(index), 0, 0)?;
        }
        let offset = pieces
            .first()
            .map_or(0, |piece| piece.start().offset_in(GRANULE.bytes()));
        let start = self.iova_of(slot, offset);
        Ok(start
            .zip(last)
            .and_then(|(start, last)| IovaRange::inclusive(start, last)))
    }

    /// Records a part of a page in the slot at `slot`. The caller maps the slot's page in the range
    /// of the buffer. Treats bytes as [`fill`](Self::fill) does. Returns the memory of the copy.
    ///
    /// # Errors
    /// The part lies outside memory. The slot holds nothing.
    #[inline]
    pub(super) fn fill_part(
        &self,
        memory: &impl PhysMemory,
        slot: u32,
        kind: SlotKind,
        original: PhysRange,
        copies: bool,
    ) -> Result<Option<PhysRange>, MemoryError> {
        let (start, bytes) = (original.start(), original.bytes());
        let offset = start.offset_in(GRANULE.bytes());
        let shadow = self.address(slot).wrapping_add(offset);
        let filled = if copies {
            memory.copy_bytes(start, shadow, bytes)
        } else {
            check(memory, start, bytes)
        };
        if let Err(error) = filled {
            self.empty(memory, slot, kind, copies);
            return Err(error);
        }
        if let Some(page) = self.page(slot) {
            page.put_part(original);
        }
        if copies {
            self.scrub(memory, slot, kind.pages(), offset, bytes)?;
        }
        Ok(PhysRange::new(shadow, bytes))
    }

    /// Zeroes the bytes of earlier buffers on `pages` pages from `index`, outside the `bytes` bytes
    /// from `offset`, which hold a new one (attack A34).
    #[inline]
    fn scrub(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        pages: u32,
        offset: u64,
        bytes: u64,
    ) -> Result<(), MemoryError> {
        let end = offset.saturating_add(bytes);
        for number in 0..pages {
            let place = index.saturating_add(number);
            let Some(page) = self.page(place) else {
                return Ok(());
            };
            let from = u64::from(number) << GRANULE.shift();
            let within = |byte: u64| byte.saturating_sub(from).min(GRANULE.bytes()) as u32;
            let new = Extent {
                lo: within(offset),
                hi: within(end),
            };
            let old = page.replace_residue(new);
            for part in old.without(new) {
                if !part.is_empty() {
                    let at = self.address(place).wrapping_add(u64::from(part.lo));
                    zero(memory, at, u64::from(part.hi - part.lo))?;
                }
            }
        }
        Ok(())
    }

    /// Removes all records of a slot whose map failed, and zeroes it if it holds bytes of buffers.
    #[cold]
    pub(super) fn empty(&self, memory: &impl PhysMemory, slot: u32, kind: SlotKind, copies: bool) {
        for number in 0..kind.pages() {
            if let Some(page) = self.page(slot.saturating_add(number)) {
                page.clear();
                page.replace_residue(Extent::default());
            }
        }
        if copies {
            let bytes = u64::from(kind.pages()) << GRANULE.shift();
            let _ = zero(memory, self.address(slot), bytes);
        }
    }

    /// Returns the kind of the slot at page `slot`, whose mapping has exactly this range, and the
    /// first piece.
    ///
    /// # Errors
    /// The range is not that of one whole mapping.
    #[inline]
    pub(super) fn check_whole(
        &self,
        slot: u32,
        range: IovaRange,
    ) -> Result<(SlotKind, Piece), UnmapRefusal> {
        let refused = UnmapRefusal::NotAllocated;
        let page = self.page(slot).filter(|page| page.begins_mapping());
        let found = page.and_then(|page| Some((page.kind()?, page.piece()?)));
        let (kind, first) = found.ok_or(refused)?;
        let (mut index, mut piece) = (slot, first);
        let starts = self.iova_of(slot, piece.offset()) == Some(range.start());
        while piece.more {
            index = index.saturating_add(piece.pages());
            piece = self.page(index).and_then(Page::piece).ok_or(refused)?;
        }
        let bytes = piece.original.bytes();
        let end = piece.offset().wrapping_add(bytes.wrapping_sub(1));
        let ends = self.iova_of(index, end) == Some(range.last());
        if starts && ends {
            Ok((kind, first))
        } else {
            Err(refused)
        }
    }

    /// Calls `each` with the pieces of the mapping in the slot at page `slot`, in order: the index
    /// of the page of its first byte, that page, and the piece.
    #[inline]
    pub(super) fn each_piece(&self, slot: u32, mut each: impl FnMut(u32, &Page, Piece)) {
        let mut index = slot;
        while let Some((page, piece)) = self.page(index).and_then(|p| Some((p, p.piece()?))) {
            each(index, page, piece);
            if !piece.more {
                break;
            }
            index = index.saturating_add(piece.pages());
        }
    }

    /// Copies the bytes that the device wrote to the buffer, each byte once, and removes the
    /// records of the mapping, whose first piece is `first`. Bytes that a sync has copied before
    /// are not copied again.
    #[inline]
    pub(super) fn finish(&self, memory: &impl PhysMemory, slot: u32, kind: SlotKind, first: Piece) {
        let writable = kind.permissions.allows(ringfence_types::Access::Write);
        let mut left = self.page(slot).map_or(0, Page::received);
        let mut next = Some((slot, first));
        while let Some((index, piece)) = next {
            let Some(page) = self.page(index) else {
                return;
            };
            if writable {
                let bytes = piece.original.bytes().min(left);
                left = left.saturating_sub(piece.original.bytes());
                let whole = Extent {
                    lo: 0,
                    hi: bytes as u32,
                };
                for part in whole.without(page.synced()) {
                    self.copy_out(memory, index, &piece, part);
                }
            }
            page.clear();
            next = None;
            if piece.more {
                let index = index.saturating_add(piece.pages());
                next = self
                    .page(index)
                    .and_then(Page::piece)
                    .map(|piece| (index, piece));
            }
        }
    }

    /// Copies a part of a piece from the shadow to the buffer.
    #[inline]
    pub(super) fn copy_out(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        piece: &Piece,
        part: Extent,
    ) {
        if !part.is_empty() {
            let (at, bytes) = (u64::from(part.lo), u64::from(part.hi - part.lo));
            let shadow = self.address(index).wrapping_add(piece.offset());
            let (from, to) = (
                shadow.wrapping_add(at),
                piece.original.start().wrapping_add(at),
            );
            // The map has checked that the buffer lies in memory.
            let _ = memory.copy_bytes(from, to, bytes);
        }
    }

    /// Copies a part of a piece from the buffer to the shadow.
    pub(super) fn copy_in(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        piece: &Piece,
        part: Extent,
    ) {
        if !part.is_empty() {
            let (at, bytes) = (u64::from(part.lo), u64::from(part.hi - part.lo));
            let shadow = self.address(index).wrapping_add(piece.offset());
            let (from, to) = (
                piece.original.start().wrapping_add(at),
                shadow.wrapping_add(at),
            );
            let _ = memory.copy_bytes(from, to, bytes);
        }
    }

    /// Returns the part of a piece that lies in `part`, of a mapping in the pool.
    pub(super) fn overlap(&self, index: u32, piece: &Piece, part: IovaRange) -> Extent {
        match self.iova_of(index, piece.offset()) {
            Some(start) => piece.overlap(start, part),
            None => Extent::default(),
        }
    }

    /// Returns the memory that the device reaches at `range` of the pool.
    pub(super) fn shadow(&self, range: IovaRange) -> Option<PhysRange> {
        let index = self.index(range.start())?;
        let offset = range.start().offset_in(GRANULE.bytes());
        PhysRange::new(self.address(index).wrapping_add(offset), range.bytes())
    }

    /// Returns true if a mapping uses a slot. Reads the state of every page.
    pub(super) fn is_in_use(&self) -> bool {
        self.pages.iter().any(Page::begins_copy)
    }
}
