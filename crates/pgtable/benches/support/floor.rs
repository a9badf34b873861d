//! Lower bounds: the cost of writing the same entries without the table's checks.
//!
//! Load from other virtual machines slows loops of loads and stores, but not waits for memory. A
//! lower bound must therefore consist of the same kind of work as the code it bounds. It accesses
//! the same words of the same table through the same dependent loads. It checks only that an entry
//! is absent before map and present before unmap. It does not check width, alignment, bounds or
//! reserved bits, and it reports no errors.

use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_memory::Arena;
use ringfence_types::{PhysAddr, PhysMemory};

/// Number of words in the arena. Masking the index replaces the bounds check.
pub(crate) const WORDS: usize = (64 << 20) / 8;
/// Mask that selects the first word of a table.
const TABLES: usize = WORDS - 512;

/// A four-level table without checks.
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

    /// Returns the index of the first word of the leaf table on the path to `page`. Three dependent
    /// loads.
    #[inline(always)]
    fn leaf_table(&self, page: u64) -> usize {
        let mut table = self.root;
        for shift in [27, 18, 9] {
            let word = &self.words[table & TABLES | (page >> shift) as usize & 511];
            table = word.load(Ordering::Acquire) as usize / 8;
        }
        table
    }

    /// Returns the entries of `pages` pages from `page` on. All must lie in one leaf table.
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

/// Sets every word to `value` (1 or 0); each must hold the other value.
#[inline(always)]
pub(crate) fn store_all(words: &[AtomicU64], value: u64) {
    for word in words {
        assert!(word.load(Ordering::Relaxed) != value);
        word.store(value, Ordering::Release);
    }
}
