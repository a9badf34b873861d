//! Leaves of several entries: the page sizes of AMD-Vi, RISC-V Svnapot, and Arm's contiguous hint.
//!
//! The entries of such a leaf lie next to each other in one table, and the leaf is aligned to its
//! size. Map installs whole leaves and unmap clears whole leaves: an entry never changes from
//! present to present. With the invalidation between unmap and the next map, that is the
//! break-before-make sequence (Arm ARM, section D8.16.1), which the contiguous hint needs.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{Iova, PageSize, PhysAddr, PhysMemory};

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

    /// Returns true if some leaf of `request` in a leaf table may have several entries. Both
    /// addresses of a leaf are aligned to its size, so they agree in the bits below.
    #[inline]
    pub(crate) fn may_have_runs(&self, request: &MapRequest) -> bool {
        let alike = Iova::new(request.iova.get() ^ request.pa.get());
        self.run_of(Level::LEAF, alike, PhysAddr::ZERO, request.pages) > 0
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

    /// Fills the entries of a leaf table with the largest leaves that fit. Not inlined, so that
    /// runs of single entries keep short code.
    #[inline(never)]
    pub(crate) fn store_runs(&self, words: &[AtomicU64], request: &MapRequest) {
        let (mut words, mut rest) = (words, *request);
        while !words.is_empty() {
            let pages = Self::leaf_pages(words.len() as u64);
            let run = self.run_of(Level::LEAF, rest.iova, rest.pa, pages);
            let entries = match run {
                0 => self.single_entries(rest.iova),
                run => 1 << run,
            };
            let (now, later) = words.split_at(entries.min(words.len()));
            self.store_leaves(Level::LEAF, now, run, &rest);
            words = later;
            rest = rest.after(Self::leaf_pages(now.len() as u64));
        }
    }

    /// Returns the number of entries from `iova` on up to the next at which a leaf of several
    /// entries can start.
    #[inline]
    fn single_entries(&self, iova: Iova) -> usize {
        let starts = |run: &u32| self.format.leaf_run(Level::LEAF, *run) == *run;
        let least = (1..usize::BITS - 1).find(starts).unwrap_or(0);
        let entry = (iova.get() >> F::GRANULE.shift()) as usize;
        let mask = (1_usize << least).wrapping_sub(1);
        mask.wrapping_sub(entry & mask).wrapping_add(1)
    }

    /// Stores `words`, which are one leaf of 2^`run` entries, or single leaves if `run` is zero.
    pub(crate) fn store_leaves(
        &self,
        level: Level,
        words: &[AtomicU64],
        run: u32,
        request: &MapRequest,
    ) {
        let format = self.format;
        let permissions = request.permissions;
        Self::store_series(words, request.pa, format.shift(level), |at| {
            format.leaf_of_run(level, at, run, permissions)
        });
    }

    /// Stores in each of `words` its `leaf`: of address `pa` in the first, and of an address
    /// 2^`shift` higher in each further one.
    #[inline(always)]
    pub(crate) fn store_series(
        words: &[AtomicU64],
        pa: PhysAddr,
        shift: u32,
        leaf: impl Fn(PhysAddr) -> u64,
    ) {
        let bytes = 1_u64.wrapping_shl(shift);
        let mut next = leaf(pa);
        let step = leaf(pa.wrapping_add(bytes)).wrapping_sub(next);
        let mut at = pa;
        for word in words {
            // Release: a walker that reads the entry also sees the page contents written before the
            // map.
            word.store(next, Ordering::Release);
            at = at.wrapping_add(bytes);
            next = match F::CONSTANT_STEP {
                true => next.wrapping_add(step),
                false => leaf(at),
            };
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
        if !self.format.may_be_run(raw) {
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
        let ends = words.first().zip(words.last());
        let Some((first, last)) = ends.map(|(f, l)| (load(f), load(l))) else {
            return Ok(());
        };
        if format.may_be_run(first) {
            self.check_first(first, iova)?;
        }
        if let Some(hole) = words.iter().position(|word| format.is_absent(load(word))) {
            let iova = Self::entry_iova(iova, hole);
            return Err(UnmapError::NotMapped { iova });
        }
        if format.may_be_run(last) {
            self.check_last(last, Self::entry_iova(iova, words.len()))?;
        }
        Ok(())
    }

    /// Checks that the leaf of the present entry `raw` begins at `iova`.
    #[inline(never)]
    fn check_first(&self, raw: u64, iova: Iova) -> Result<(), UnmapError> {
        let size = self.leaf_size_of(raw).bytes();
        if iova.is_aligned(size) {
            return Ok(());
        }
        let iova = iova.align_down(size);
        Err(UnmapError::WouldSplit { iova })
    }

    /// Checks that the leaf of the present entry `raw` ends before `end`.
    #[inline(never)]
    fn check_last(&self, raw: u64, end: Iova) -> Result<(), UnmapError> {
        let size = self.leaf_size_of(raw).bytes();
        if end.is_aligned(size) {
            return Ok(());
        }
        let iova = end.align_down(size);
        Err(UnmapError::WouldSplit { iova })
    }

    /// Returns the address of entry `index` after that of `iova` in a leaf table.
    #[inline]
    fn entry_iova(iova: Iova, index: usize) -> Iova {
        iova.wrapping_add((index as u64).wrapping_shl(F::GRANULE.shift()))
    }
}

#[inline]
fn load(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}
