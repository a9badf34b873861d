//! Leaves of several entries: the page sizes of AMD-Vi, RISC-V Svnapot, and Arm's contiguous hint.
//!
//! The entries of such a leaf lie next to each other in one table, and the leaf is aligned to its
//! size. Map installs whole leaves and unmap clears whole leaves: an entry never changes from
//! present to present. With the invalidation between unmap and the next map, that is the
//! break-before-make sequence (Arm ARM, section D8.16.1), which the contiguous hint needs.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{Iova, PageSize, Permissions, PhysAddr, PhysMemory};

use crate::{Entry, Format, Level, MapRequest, Table, UnmapError};

/// Binary logarithm of the unit of [`MapRequest::pages`].
const PAGE_SHIFT: u32 = PageSize::Size4K.shift();

/// The entries that one step of a map installs in one table.
pub(crate) struct Step {
    pub(crate) entries: u64,
    /// Number of 4 KiB pages that the entries map.
    pub(crate) pages: u64,
}

impl<F: Format> Table<F> {
    /// Returns the number of entries of a leaf table that `pages` pages of 4 KiB need.
    #[inline(always)]
    pub(crate) fn leaf_entries(pages: u64) -> u64 {
        pages >> (F::GRANULE.shift() - PAGE_SHIFT)
    }

    /// Returns the number of 4 KiB pages that `entries` entries of a leaf table map.
    #[inline(always)]
    pub(crate) fn leaf_pages(entries: u64) -> u64 {
        entries.wrapping_shl(F::GRANULE.shift() - PAGE_SHIFT)
    }

    /// Returns the number of 4 KiB pages that the leaf table maps from the entry of `iova` on.
    #[inline]
    pub(crate) fn pages_to_end(&self, iova: Iova) -> u64 {
        let index = self.format.index(Level::LEAF, iova);
        let entries = self.format.entries(Level::LEAF);
        Self::leaf_pages(entries.wrapping_sub(index) as u64)
    }

    /// Returns the step at `level` for the start of `rest`: one larger leaf, or leaves up to the
    /// end of the leaf table. `linked` is the address of the first entry if its table is linked.
    pub(crate) fn step<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        level: Level,
        rest: &MapRequest,
        linked: Option<PhysAddr>,
    ) -> Step {
        if level == Level::LEAF {
            let pages = rest.pages.min(self.pages_to_end(rest.iova));
            let entries = Self::leaf_entries(pages);
            return Step { entries, pages };
        }
        let mut run = self.run_of(level, rest.iova, rest.pa, rest.pages);
        // An entry of the run may point to a table: map uses it.
        while run > 0 && !linked.is_none_or(|at| self.are_absent(mem, at, 1_usize << run)) {
            run = self.format.leaf_run(level, run.wrapping_sub(1));
        }
        let size = self.format.leaf_size(level);
        Step {
            entries: 1 << run,
            pages: size.map_or(1, PageSize::granules).wrapping_shl(run),
        }
    }

    /// Returns the step that installed the start of `rest` at `level`. Its first entry is at `at`.
    pub(crate) fn installed<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        level: Level,
        at: PhysAddr,
        rest: &MapRequest,
    ) -> Step {
        if level == Level::LEAF {
            return self.step(mem, level, rest, None);
        }
        let raw = mem.word(at).map_or(0, |word| word.load(Ordering::Relaxed));
        let size = match self.format.decode(level, raw) {
            Entry::Leaf { size, .. } => Some(size),
            _ => self.format.leaf_size(level),
        };
        let size = size.unwrap_or(PageSize::Size4K);
        Step {
            entries: (size.bytes() >> self.format.shift(level)).max(1),
            pages: size.granules(),
        }
    }

    /// Returns the binary logarithm of the number of entries of the largest leaf at `level` for the
    /// first of `pages` pages at `iova` and `pa`.
    #[inline]
    fn run_of(&self, level: Level, iova: Iova, pa: PhysAddr, pages: u64) -> u32 {
        if !self.format.has_runs() {
            return 0;
        }
        let shift = self.format.shift(level);
        let aligned = (iova.get() | pa.get()).trailing_zeros();
        let long = pages
            .checked_ilog2()
            .unwrap_or(0)
            .saturating_add(PAGE_SHIFT);
        let most = aligned.min(long).saturating_sub(shift);
        self.format.leaf_run(level, most)
    }

    /// Returns true if the `entries` entries at `at` are absent.
    pub(crate) fn are_absent<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        at: PhysAddr,
        entries: usize,
    ) -> bool {
        mem.words(at, entries).is_ok_and(|words| {
            let mut words = words.iter();
            words.all(|word| self.format.is_absent(word.load(Ordering::Relaxed)))
        })
    }

    /// Fills the entries of a leaf table with the largest leaves that fit.
    pub(crate) fn store_runs(&self, words: &[AtomicU64], request: &MapRequest) {
        let (mut words, mut rest) = (words, *request);
        while !words.is_empty() {
            let pages = Self::leaf_pages(words.len() as u64);
            let run = self.run_of(Level::LEAF, rest.iova, rest.pa, pages);
            let entries = (1_usize << run).min(words.len());
            let (now, later) = words.split_at(entries);
            self.store_leaf(Level::LEAF, now, rest.pa, rest.permissions);
            words = later;
            rest = rest.after(Self::leaf_pages(entries as u64));
        }
    }

    /// Stores the leaf of all of `words`, a power of two of entries, from address `pa` on.
    pub(crate) fn store_leaf(
        &self,
        level: Level,
        words: &[AtomicU64],
        pa: PhysAddr,
        permissions: Permissions,
    ) {
        let run = words.len().trailing_zeros();
        let bytes = 1_u64.wrapping_shl(self.format.shift(level));
        let mut at = pa;
        for word in words {
            let leaf = self.format.leaf_of_run(level, at, run, permissions);
            // Release: a walker that reads the entry also sees the contents of the page.
            word.store(leaf, Ordering::Release);
            at = at.wrapping_add(bytes);
        }
    }

    /// Returns the size of the leaf that entry `raw` of a leaf table belongs to.
    #[inline]
    fn leaf_size_of(&self, raw: u64) -> PageSize {
        match self.format.decode(Level::LEAF, raw) {
            Entry::Leaf { size, .. } => size,
            _ => F::GRANULE,
        }
    }

    /// Checks that the present entry `raw` for `iova` is a leaf of one entry.
    #[inline]
    pub(crate) fn check_single(&self, raw: u64, iova: Iova) -> Result<(), UnmapError> {
        if !self.format.has_runs() {
            return Ok(());
        }
        let size = self.leaf_size_of(raw);
        if size == F::GRANULE {
            return Ok(());
        }
        let iova = iova.align_down(size.bytes());
        Err(UnmapError::WouldSplit { iova })
    }

    /// Checks that the entries of a leaf table from `iova` on are present and contain no part of a
    /// leaf without the rest.
    #[inline]
    pub(crate) fn check_present(&self, words: &[AtomicU64], iova: Iova) -> Result<(), UnmapError> {
        let format = self.format;
        let address = |index: usize| {
            let bytes = (index as u64).wrapping_shl(F::GRANULE.shift());
            iova.wrapping_add(bytes)
        };
        if format.has_runs()
            && let Some(first) = words.first()
        {
            let size = self.leaf_size_of(first.load(Ordering::Relaxed));
            if !iova.is_aligned(size.bytes()) {
                let iova = iova.align_down(size.bytes());
                return Err(UnmapError::WouldSplit { iova });
            }
        }
        if let Some(hole) = words
            .iter()
            .position(|word| format.is_absent(word.load(Ordering::Relaxed)))
        {
            return Err(UnmapError::NotMapped {
                iova: address(hole),
            });
        }
        if format.has_runs()
            && let Some(last) = words.last()
        {
            let size = self.leaf_size_of(last.load(Ordering::Relaxed));
            if !address(words.len()).is_aligned(size.bytes()) {
                let last = address(words.len().wrapping_sub(1));
                let iova = last.align_down(size.bytes());
                return Err(UnmapError::WouldSplit { iova });
            }
        }
        Ok(())
    }
}
