//! The yardsticks: what the same entries cost to write with every check left out that the table
//! makes.
//!
//! A neighbour slows loops of loads and stores and leaves waits for memory alone, so a yardstick is
//! of the same class as what it measures: the same words of the same table, reached by the same
//! dependent loads. Nothing is checked but that an entry is absent before it is made and present
//! before it is cleared: no width, no alignment, no bounds, no reserved bits, no errors.

use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_memory::Arena;
use ringfence_types::{PhysAddr, PhysMemory};

/// Words of the arena. The mask of the index stands for the bounds check.
pub(crate) const WORDS: usize = (64 << 20) / 8;
/// The words that begin a table.
const TABLES: usize = WORDS - 512;

/// A four-level table, bare.
#[derive(Clone, Copy)]
pub(crate) struct Bare {
    words: &'static [AtomicU64; WORDS],
    root: usize,
}

impl Bare {
    pub(crate) fn new(mem: &'static Arena, root: PhysAddr) -> Self {
        let words = mem.words(PhysAddr::ZERO, WORDS).expect("all of the arena");
        Self {
            words: words.first_chunk().expect("as many words"),
            root: root.get() as usize / 8,
        }
    }

    /// Index of the first word of the leaf table on the path to `page`: three dependent loads.
    #[inline(always)]
    fn leaf_table(&self, page: u64) -> usize {
        let mut table = self.root;
        for shift in [27, 18, 9] {
            let word = &self.words[table & TABLES | (page >> shift) as usize & 511];
            table = word.load(Ordering::Acquire) as usize / 8;
        }
        table
    }

    /// The entries of `pages` pages from `page` on, all in one leaf table.
    #[inline(always)]
    fn leaves(&self, page: u64, pages: u64) -> &'static [AtomicU64] {
        let at = self.leaf_table(page) & TABLES | page as usize & 511;
        &self.words[at..at + pages as usize]
    }

    #[inline(always)]
    pub(crate) fn map(&self, page: u64, leaf: u64) {
        let word = &self.words[self.leaf_table(page) & TABLES | page as usize & 511];
        assert!(word.load(Ordering::Relaxed) & 3 == 0);
        word.store(leaf, Ordering::Release);
    }

    #[inline(always)]
    pub(crate) fn unmap(&self, page: u64) {
        let word = &self.words[self.leaf_table(page) & TABLES | page as usize & 511];
        assert!(word.load(Ordering::Relaxed) & 3 != 0);
        word.store(0, Ordering::Release);
    }

    #[inline(always)]
    pub(crate) fn map_run(&self, page: u64, pages: u64, leaf: u64) {
        let words = self.leaves(page, pages);
        let any = words
            .iter()
            .fold(0, |all, word| all | word.load(Ordering::Relaxed));
        assert!(any & 3 == 0);
        for (at, word) in words.iter().enumerate() {
            word.store(leaf + ((at as u64) << 12), Ordering::Release);
        }
    }

    #[inline(always)]
    pub(crate) fn unmap_run(&self, page: u64, pages: u64) {
        let words = self.leaves(page, pages);
        assert!(
            words
                .iter()
                .all(|word| word.load(Ordering::Relaxed) & 3 != 0)
        );
        for word in words {
            word.store(0, Ordering::Release);
        }
    }
}

/// Changes every word to `value`, 1 or 0, from the other.
#[inline(always)]
pub(crate) fn store_all(words: &[AtomicU64], value: u64) {
    for word in words {
        assert!(word.load(Ordering::Relaxed) != value);
        word.store(value, Ordering::Release);
    }
}
