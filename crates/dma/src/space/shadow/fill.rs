//! The content of a slot: the records of a mapping's pieces, and the copies of their bytes.

use ringfence_types::{IovaRange, MemoryError, PhysAddr, PhysMemory, PhysRange};

use super::page::{Extent, PieceFlags, SlotKind};
use super::pool::ShadowPool;
use crate::copy::{check, zero};
use crate::space::GRANULE;

impl<L> ShadowPool<L> {
    /// Records `pieces` in the slot at `slot`, each at its offset in its first page. If `copies` is
    /// true, copies their bytes and zeroes all bytes of earlier buffers. That includes slots that
    /// the device only writes: not every table has write-only pages. Returns the range of the
    /// mapping.
    ///
    /// # Errors
    /// A piece, or a part of the slot, lies outside memory. The slot holds nothing.
    #[inline]
    pub(super) fn fill(
        &self,
        memory: &impl PhysMemory,
        slot: u32,
        kind: SlotKind,
        pieces: &[PhysRange],
        copies: bool,
    ) -> Result<Option<IovaRange>, MemoryError> {
        let &[original] = pieces else {
            return self.fill_list(memory, slot, kind, pieces, copies);
        };
        let offset = self.fill_whole(memory, slot, kind, original, PieceFlags::ONLY, copies)?;
        let start = self.iova_of(slot, offset);
        Ok(start.and_then(|start| IovaRange::new(start, original.bytes())))
    }

    /// Fills a slot like [`fill`](Self::fill), with any number of pieces.
    #[inline(never)]
    fn fill_list(
        &self,
        memory: &impl PhysMemory,
        slot: u32,
        kind: SlotKind,
        pieces: &[PhysRange],
        copies: bool,
    ) -> Result<Option<IovaRange>, MemoryError> {
        let mut index = slot;
        let (mut start, mut last) = (None, None);
        for (number, original) in pieces.iter().enumerate() {
            let more = number.saturating_add(1) < pieces.len();
            let flags = PieceFlags::of_list(number == 0, more);
            let (at, bytes) = (original.start(), original.bytes());
            let filled = if copies {
                self.copy_in(memory, index, at, Extent::first(bytes))
            } else {
                check(memory, at, bytes)
            };
            filled.inspect_err(|_| self.empty(memory, slot, kind, copies))?;
            if let Some(page) = self.page(index) {
                page.put(*original, flags);
            }
            let offset = at.offset_in(GRANULE.bytes());
            start = start.or_else(|| self.iova_of(index, offset));
            last = self.iova_of(index, offset.wrapping_add(bytes.wrapping_sub(1)));
            let pages = original.pages(GRANULE) as u32;
            if copies {
                self.scrub(memory, index, pages, offset, bytes)
                    .inspect_err(|_| self.empty(memory, slot, kind, true))?;
            }
            index = index.saturating_add(pages);
        }
        if copies {
            let end = slot.saturating_add(kind.pages());
            self.scrub(memory, index, end.saturating_sub(index), 0, 0)
                .inspect_err(|_| self.empty(memory, slot, kind, true))?;
        }
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
        let offset = self.fill_whole(memory, slot, kind, original, PieceFlags::PART, copies)?;
        let shadow = self.address(slot).wrapping_add(offset);
        Ok(PhysRange::new(shadow, original.bytes()))
    }

    /// Records the only piece of a slot, treats bytes as [`fill`](Self::fill) does, and returns the
    /// piece's offset.
    ///
    /// # Errors
    /// The piece lies outside memory. The slot holds nothing.
    #[inline]
    fn fill_whole(
        &self,
        memory: &impl PhysMemory,
        slot: u32,
        kind: SlotKind,
        original: PhysRange,
        flags: PieceFlags,
        copies: bool,
    ) -> Result<u64, MemoryError> {
        let (start, bytes) = (original.start(), original.bytes());
        if copies {
            self.copy_whole(memory, slot, kind, original)?;
        } else {
            check(memory, start, bytes).inspect_err(|_| self.empty(memory, slot, kind, false))?;
        }
        if let Some(page) = self.page(slot) {
            page.put(original, flags);
        }
        Ok(start.offset_in(GRANULE.bytes()))
    }

    /// Copies the only piece of a slot to it, and zeroes all other bytes of earlier buffers.
    ///
    /// # Errors
    /// The piece lies outside memory. The slot holds nothing.
    #[inline(never)]
    fn copy_whole(
        &self,
        memory: &impl PhysMemory,
        slot: u32,
        kind: SlotKind,
        original: PhysRange,
    ) -> Result<(), MemoryError> {
        let bytes = original.bytes();
        self.copy_in(memory, slot, original.start(), Extent::first(bytes))
            .inspect_err(|_| self.empty(memory, slot, kind, true))?;
        let offset = original.start().offset_in(GRANULE.bytes());
        self.scrub(memory, slot, kind.pages(), offset, bytes)
            .inspect_err(|_| self.empty(memory, slot, kind, true))
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
            let page_index = index.saturating_add(number);
            let Some(page) = self.page(page_index) else {
                return Ok(());
            };
            let from = u64::from(number) << GRANULE.shift();
            let within = |byte: u64| byte.saturating_sub(from).min(GRANULE.bytes()) as u32;
            let new = Extent {
                lo: within(offset),
                hi: within(end),
            };
            if let Some(old) = page.replace_residue(new) {
                self.zero_parts(memory, page_index, old.without(new))?;
            }
        }
        Ok(())
    }

    /// Zeroes parts of the page at `index`.
    #[inline(never)]
    fn zero_parts(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        parts: [Extent; 2],
    ) -> Result<(), MemoryError> {
        for part in parts {
            if !part.is_empty() {
                let at = self.address(index).wrapping_add(u64::from(part.lo));
                zero(memory, at, u64::from(part.bytes()))?;
            }
        }
        Ok(())
    }

    /// Removes all records of a slot whose map failed, and zeroes it if it holds bytes of buffers.
    /// A slot that cannot be zeroed keeps its bytes as residue.
    #[cold]
    pub(super) fn empty(&self, memory: &impl PhysMemory, slot: u32, kind: SlotKind, copies: bool) {
        let bytes = u64::from(kind.pages()) << GRANULE.shift();
        let residue = if copies && zero(memory, self.address(slot), bytes).is_err() {
            Extent::first(GRANULE.bytes())
        } else {
            Extent::default()
        };
        for number in 0..kind.pages() {
            if let Some(page) = self.page(slot.saturating_add(number)) {
                page.clear();
                page.replace_residue(residue);
            }
        }
    }

    /// Copies a part of the piece that begins at `start` of the buffer, and on page `index` of the
    /// pool, from the buffer to the shadow.
    ///
    /// # Errors
    /// The part lies outside memory. Nothing was copied.
    pub(super) fn copy_in(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        start: PhysAddr,
        part: Extent,
    ) -> Result<(), MemoryError> {
        let (at, bytes) = (u64::from(part.lo), u64::from(part.bytes()));
        let offset = start.offset_in(GRANULE.bytes());
        let shadow = self.address(index).wrapping_add(offset);
        memory.copy_bytes(start.wrapping_add(at), shadow.wrapping_add(at), bytes)
    }
}

#[cfg(test)]
mod tests {
    use core::cell::RefCell;
    use core::sync::atomic::AtomicU64;
    use core::sync::atomic::Ordering::Relaxed;

    use ringfence_memory::Arena;
    use ringfence_types::{Iova, Permissions, TABLE_WORDS};

    use super::*;

    const POOL: u64 = 0x10_0000;
    const BUFFERS: u64 = 0x20_0000;

    /// Memory without the page `lost`.
    struct Damaged<'m>(&'m Arena, u64);

    impl Damaged<'_> {
        fn check(&self, at: PhysAddr, words: u64) -> Result<(), MemoryError> {
            let last = at.get().wrapping_add(words * 8 - 1);
            let is_lost = at.get() >> 12 <= self.1 && self.1 <= last >> 12;
            (!is_lost)
                .then_some(())
                .ok_or(MemoryError::Outside { at, words })
        }
    }

    impl PhysMemory for Damaged<'_> {
        fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
            self.check(at, 1)?;
            self.0.word(at)
        }

        fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
            self.check(at, 512)?;
            self.0.table(at)
        }

        fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
            self.check(at, count as u64)?;
            self.0.words(at, count)
        }

        fn write_back(&self, _: PhysAddr, _: u64) {}

        fn drain(&self) {}
    }

    fn bytes(at: u64, bytes: u64) -> PhysRange {
        PhysRange::new(PhysAddr::new(at), bytes).unwrap()
    }

    /// A page of the pool becomes inaccessible after a buffer was copied to it. The next copy to
    /// its slot fails, because the residue on that page cannot be zeroed. The slot holds nothing
    /// then.
    #[test]
    fn a_slot_that_cannot_be_zeroed_holds_nothing() {
        let memory = Arena::new(4 << 20).unwrap();
        for word in memory.words(PhysAddr::new(BUFFERS), 4 * 512).unwrap() {
            word.store(u64::MAX, Relaxed);
        }
        let one = bytes(BUFFERS, 4096);
        let short = bytes(BUFFERS + 0x1000, 8);
        for (name, lost, pieces) in [
            ("the page after the only piece", 1, [one].as_slice()),
            ("the page after a list", 2, &[one, one]),
            ("a page of a list, after its copy", 1, &[one, short]),
        ] {
            let kind = SlotKind::for_pages(4, Permissions::READ_WRITE).unwrap();
            let pool = ShadowPool::new(bytes(POOL, 4 << 12), RefCell::new).unwrap();
            pool.set_base(Iova::new(0x8000));
            pool.prepare_run(&memory, kind, 0, 1).unwrap();
            let before = bytes(BUFFERS, 4 << 12);
            assert!(pool.fill(&memory, 0, kind, &[before], true).is_ok());
            pool.page(0).unwrap().clear();
            assert!(!pool.is_in_use());
            let damaged = Damaged(&memory, (POOL >> 12) + lost);
            let refused = pool.fill(&damaged, 0, kind, pieces, true);
            assert!(refused.is_err(), "{name}");
            assert!(!pool.is_in_use(), "{name}");
            // The next buffer finds no byte of an earlier one in the slot (attack A34).
            assert!(pool.fill(&memory, 0, kind, &[short], true).is_ok());
            let words = memory.words(PhysAddr::new(POOL), 4 * 512).unwrap();
            let held = words.iter().filter(|word| word.load(Relaxed) != 0);
            assert_eq!(held.count(), 1, "{name}");
        }
    }
}
