//! Unmap: clears leaves. A table behind a leaf cache (mode `fence`) enters through
//! `LeafCache::unmap_with` in `leaf_cache.rs`, which calls `clear_leaf_entries`.

use core::sync::atomic::Ordering;

use ringfence_types::{CachedLevels, Iova, Pfn, PfnRange, PhysAddr, PhysMemory, Unmapped};

use crate::entry_count::{EntryCount, NoCount};
use crate::table::{Corrupt, WalkResult};
use crate::write_back::{DeferredWriteBack, ImmediateWriteBack, WriteBackPolicy};
use crate::{DirtyLines, Entry, Format, Level, Table, UnmapError};

/// A run of present entries in one table.
struct Run<'m> {
    lowest: WalkResult<'m>,
    at: PhysAddr,
    entries: u64,
    /// Number of 4 KiB pages that the entries cover.
    pages: u64,
}

impl<F: Format> Table<F> {
    /// Clears the leaves of `range`. Table pages stay linked, so walk caches stay valid and only
    /// leaves need invalidation: [`CachedLevels::Leaves`].
    ///
    /// On a non-coherent platform the cleared entries are in memory on return.
    ///
    /// # Errors
    /// A page of the range is not mapped, or the range covers only part of a larger page. The table
    /// is unchanged, except after a breach of the contract of [`Table`]: see [`UnmapError`].
    #[inline]
    pub fn unmap<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        self.unmap_with(mem, range, ImmediateWriteBack(self.coherency), NoCount)
    }

    /// Like [`unmap`](Self::unmap), but records dirty cache lines in `dirty`. The driver must call
    /// [`DirtyLines::sync`] before it submits the invalidation. Otherwise a walker that does not
    /// snoop may cache the old entries again after the invalidation.
    #[inline]
    pub fn unmap_nosync<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        range: PfnRange,
        dirty: &mut DirtyLines,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        self.unmap_with(
            mem,
            range,
            DeferredWriteBack(self.coherency, dirty),
            NoCount,
        )
    }

    #[inline(always)]
    pub(crate) fn unmap_with<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        range: PfnRange,
        mut write_back: impl WriteBackPolicy,
        entry_count: impl EntryCount<F>,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        if let Some(leaf) = self.leaf_entry(mem, range.lo().iova(), range.pages()) {
            self.clear_leaf_entries(mem, leaf.at, &range, &mut write_back)?;
            let entries = Self::leaf_entries(range.pages());
            entry_count.removed(&self.format, leaf.parent, entries);
            write_back.finish(mem);
        } else {
            self.unmap_uncommon(mem, range, write_back, entry_count)?;
        }
        Ok((
            Unmapped::attest_cleared(self.domain(), range),
            CachedLevels::Leaves,
        ))
    }

    /// Slow path of [`unmap_with`](Self::unmap_with): any table, and invalid ranges.
    #[inline(never)]
    fn unmap_uncommon<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        range: PfnRange,
        mut write_back: impl WriteBackPolicy,
        entry_count: impl EntryCount<F>,
    ) -> Result<(), UnmapError> {
        let iova = range.lo().iova();
        self.check_range(&range)?;
        let lowest = self
            .walk_linked(mem, iova)
            .map_err(|Corrupt| UnmapError::Corrupt { iova })?;
        if lowest.level == Level::LEAF && range.pages() <= self.pages_to_end(iova) {
            let at = self.entry_address(lowest.level, lowest.table, iova);
            self.clear_leaf_entries(mem, at, &range, &mut write_back)?;
            let entries = Self::leaf_entries(range.pages());
            entry_count.removed(&self.format, lowest.parent, entries);
        } else {
            self.unmap_long(mem, &range, &mut write_back, entry_count)?;
        }
        write_back.finish(mem);
        Ok(())
    }

    fn check_range(&self, range: &PfnRange) -> Result<(), UnmapError> {
        let iova = range.lo().iova();
        if !self.translates_all(iova, range.hi().iova()) {
            return Err(UnmapError::BeyondWidth { iova });
        }
        Self::check_whole_granules(range)
    }

    /// Checks that `range` covers no part of the smallest page of the format without the rest.
    #[inline(always)]
    fn check_whole_granules(range: &PfnRange) -> Result<(), UnmapError> {
        let mask = F::GRANULE.granules().wrapping_sub(1);
        if (range.lo().get() | range.pages()) & mask == 0 {
            return Ok(());
        }
        let starts_inside = range.lo().get() & mask != 0;
        let page = if starts_inside {
            range.lo()
        } else {
            range.hi()
        };
        let iova = page.iova().align_down(F::GRANULE.bytes());
        Err(UnmapError::WouldSplit { iova })
    }

    /// Clears the entries of a leaf table from `at` on. Fails without a store if any of them is
    /// absent.
    #[inline(always)]
    pub(crate) fn clear_leaf_entries<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        at: PhysAddr,
        range: &PfnRange,
        write_back: &mut impl WriteBackPolicy,
    ) -> Result<(), UnmapError> {
        let entries = Self::leaf_entries(range.pages());
        let iova = range.lo().iova();
        Self::check_whole_granules(range)?;
        if entries == 1 {
            let word = mem.word(at).map_err(|_| UnmapError::Corrupt { iova })?;
            let raw = word.load(Ordering::Relaxed);
            if self.format.is_absent(raw) {
                return Err(UnmapError::NotMapped { iova });
            }
            self.check_single(raw, iova)?;
            word.store(0, Ordering::Release);
            write_back.touched(mem, at, 8);
            return Ok(());
        }
        self.clear_run(mem, at, range)?;
        write_back.touched(mem, at, entries.wrapping_mul(8));
        Ok(())
    }

    /// [`clear_leaf_entries`](Self::clear_leaf_entries) for several pages.
    #[inline(always)]
    fn clear_run<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        at: PhysAddr,
        range: &PfnRange,
    ) -> Result<(), UnmapError> {
        let iova = range.lo().iova();
        let words = mem
            .words(at, Self::leaf_entries(range.pages()) as usize)
            .map_err(|_| UnmapError::Corrupt { iova })?;
        self.check_present(words, iova)?;
        for word in words {
            word.store(0, Ordering::Release);
        }
        Ok(())
    }

    /// Unmaps a range that spans several tables or covers larger pages. Checks the whole range
    /// first, then clears it.
    #[cold]
    #[inline(never)]
    fn unmap_long<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        range: &PfnRange,
        write_back: &mut impl WriteBackPolicy,
        entry_count: impl EntryCount<F>,
    ) -> Result<(), UnmapError> {
        let mut checked = 0;
        while checked < range.pages() {
            let run = self.run_at(mem, range, checked)?;
            checked = checked.saturating_add(run.pages.max(1));
        }
        let cleared = self.clear_checked(mem, range, write_back, entry_count);
        if cleared.is_err() {
            // Some runs are cleared. Finish their write-back: a caller may still invalidate them.
            write_back.finish(mem);
        }
        cleared
    }

    /// Clears a checked range. Fails only if another CPU breaks the contract of [`Table`] and
    /// changes entries of the range. The runs before that entry are then cleared.
    fn clear_checked<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        range: &PfnRange,
        write_back: &mut impl WriteBackPolicy,
        entry_count: impl EntryCount<F>,
    ) -> Result<(), UnmapError> {
        let mut cleared = 0;
        while cleared < range.pages() {
            let run = self.run_at(mem, range, cleared)?;
            let iova = page_at(range.lo().iova(), cleared);
            let words = mem
                .words(run.at, run.entries as usize)
                .map_err(|_| UnmapError::Corrupt { iova })?;
            for word in words {
                word.store(0, Ordering::Release);
            }
            write_back.touched(mem, run.at, run.entries.wrapping_mul(8));
            entry_count.removed(&self.format, run.lowest.parent, run.entries);
            cleared = cleared.saturating_add(run.pages.max(1));
        }
        Ok(())
    }

    /// Returns the run of present leaves from page `skipped` of `range` on, up to the end of one
    /// table or of one larger page.
    fn run_at<'m, M: PhysMemory + ?Sized>(
        &self,
        mem: &'m M,
        range: &PfnRange,
        skipped: u64,
    ) -> Result<Run<'m>, UnmapError> {
        let left = range.pages().saturating_sub(skipped);
        let iova = page_at(range.lo().iova(), skipped);
        let corrupt = UnmapError::Corrupt { iova };
        let lowest = self.walk_linked(mem, iova).map_err(|Corrupt| corrupt)?;
        let at = self.entry_address(lowest.level, lowest.table, iova);
        if lowest.level == Level::LEAF {
            let pages = left.min(self.pages_to_end(iova));
            let entries = Self::leaf_entries(pages);
            let words = mem.words(at, entries as usize).map_err(|_| corrupt)?;
            self.check_present(words, iova)?;
            return Ok(Run {
                lowest,
                at,
                entries,
                pages,
            });
        }
        let word = mem.word(at).map_err(|_| corrupt)?;
        match self
            .format
            .decode(lowest.level, word.load(Ordering::Acquire))
        {
            Entry::Leaf { size, .. } => {
                if !iova.is_aligned(size.bytes()) || size.granules() > left {
                    return Err(UnmapError::WouldSplit {
                        iova: iova.align_down(size.bytes()),
                    });
                }
                Ok(Run {
                    at,
                    entries: (size.bytes() >> self.format.shift(lowest.level)).max(1),
                    lowest,
                    pages: size.granules(),
                })
            }
            Entry::Absent => Err(UnmapError::NotMapped { iova }),
            Entry::Table { .. } | Entry::Reserved => Err(corrupt),
        }
    }
}

/// Returns the IOVA of page `index` after `first`. The range must not wrap.
#[inline]
fn page_at(first: Iova, index: u64) -> Iova {
    Pfn::new(Pfn::containing(first).get().wrapping_add(index)).iova()
}
