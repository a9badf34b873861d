//! Map: installs leaves and links table pages. A table behind a leaf cache (mode `fence`) enters
//! through `LeafCache::map_with` in `leaf_cache.rs`, which calls `store_leaf_entries`.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{FrameSource, Iova, PageSize, Permissions, Pfn, PhysAddr, PhysMemory};

use crate::entry_count::{EntryCount, NoCount};
use crate::frame_reserve::FrameReserve;
use crate::leaf_run::Step;
use crate::table::{Corrupt, WalkResult};
use crate::write_back::{DeferredWriteBack, ImmediateWriteBack, WriteBackPolicy};
use crate::{Coherency, DirtyLines, Entry, Format, Level, MapError, Table};

/// The unit of [`MapRequest::pages`].
const PAGE: PageSize = PageSize::Size4K;

/// A run of pages to map, contiguous in IOVA and in physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MapRequest {
    /// IOVA of the first page, aligned to the granule of the format.
    pub iova: Iova,
    /// Physical address of the first page, aligned to the granule of the format.
    pub pa: PhysAddr,
    /// Number of 4 KiB pages: whole granules.
    pub pages: u64,
    /// Permissions of the device.
    pub permissions: Permissions,
}

impl MapRequest {
    /// Returns the request without its first `skipped` pages. `skipped` is less than `pages`.
    #[inline]
    pub(crate) fn after(&self, skipped: u64) -> Self {
        let bytes = skipped.wrapping_mul(PAGE.bytes());
        Self {
            iova: self.iova.wrapping_add(bytes),
            pa: self.pa.wrapping_add(bytes),
            pages: self.pages.wrapping_sub(skipped),
            permissions: self.permissions,
        }
    }
}

impl<F: Format> Table<F> {
    /// Maps `request` with the largest pages that the format and the alignment of both addresses
    /// allow. If a table of 4 KiB entries is already linked, map uses it: map never unlinks a
    /// table.
    ///
    /// Walks the path once per leaf table, not once per page. On a non-coherent platform all
    /// entries are in memory on return.
    ///
    /// # Errors
    /// On error the table is unchanged and no table page was linked. No device has seen any part of
    /// the range.
    #[inline]
    pub fn map<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        frames: &S,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.map_with(
            mem,
            frames,
            request,
            ImmediateWriteBack(self.coherency),
            NoCount,
        )
    }

    /// Like [`map`](Self::map), but records dirty cache lines in `dirty`. The driver must call
    /// [`DirtyLines::sync`] before it gives the IOVA to a device.
    #[inline]
    pub fn map_nosync<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        frames: &S,
        request: MapRequest,
        dirty: &mut DirtyLines,
    ) -> Result<(), MapError> {
        self.map_with(
            mem,
            frames,
            request,
            DeferredWriteBack(self.coherency, dirty),
            NoCount,
        )
    }

    #[inline(always)]
    pub(crate) fn map_with<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        frames: &S,
        request: MapRequest,
        mut write_back: impl WriteBackPolicy,
        entry_count: impl EntryCount<F>,
    ) -> Result<(), MapError> {
        if self.check_granules(&request).is_ok()
            && let Some(leaf) = self.leaf_entry(mem, request.iova, request.pages)
        {
            self.store_leaf_entries(mem, leaf.at, &request, &mut write_back)?;
            let entries = Self::leaf_entries(request.pages);
            entry_count.added(&self.format, leaf.parent, entries);
            write_back.finish(mem);
            return Ok(());
        }
        // Pass a copy, so that `request` itself stays in registers.
        self.map_uncommon(
            mem,
            frames,
            MapRequest { ..request },
            write_back,
            entry_count,
        )
    }

    /// Slow path of [`map_with`](Self::map_with): any table, and invalid requests.
    #[inline(never)]
    fn map_uncommon<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        frames: &S,
        request: MapRequest,
        mut write_back: impl WriteBackPolicy,
        entry_count: impl EntryCount<F>,
    ) -> Result<(), MapError> {
        self.check_request(&request)?;
        let lowest = self
            .walk_linked(mem, request.iova)
            .map_err(|Corrupt| MapError::Corrupt { iova: request.iova })?;
        if lowest.level == Level::LEAF && request.pages <= self.pages_to_end(request.iova) {
            let at = self.entry_address(lowest.level, lowest.table, request.iova);
            self.store_leaf_entries(mem, at, &request, &mut write_back)?;
            let entries = Self::leaf_entries(request.pages);
            entry_count.added(&self.format, lowest.parent, entries);
        } else {
            self.map_long(mem, frames, &request, &mut write_back, entry_count)?;
        }
        write_back.finish(mem);
        Ok(())
    }

    fn check_request(&self, request: &MapRequest) -> Result<(), MapError> {
        self.check_granules(request)?;
        let MapRequest { iova, pages, .. } = *request;
        let last = last_page(iova.get(), pages);
        if last > Pfn::MAX.get() || !self.translates_all(iova, Pfn::new(last).iova()) {
            return Err(MapError::BeyondWidth { iova });
        }
        Ok(())
    }

    /// Returns true if the table translates every page from `first` to `last`. With sign extension,
    /// the addresses between the two halves are not translated.
    pub(crate) fn translates_all(&self, first: Iova, last: Iova) -> bool {
        let format = &self.format;
        let differ = (first.get() ^ last.get()).checked_shr(format.width());
        format.translates(first) && format.translates(last) && differ.unwrap_or(0) == 0
    }

    /// [`check_request`](Self::check_request) without the width check.
    #[inline(always)]
    pub(crate) fn check_granules(&self, request: &MapRequest) -> Result<(), MapError> {
        let MapRequest {
            iova, pa, pages, ..
        } = *request;
        if pages == 0 {
            return Err(MapError::Empty);
        }
        let bytes = pages.wrapping_shl(PAGE.shift());
        if (iova.get() | pa.get() | bytes) & (F::GRANULE.bytes() - 1) != 0 {
            return Err(MapError::Misaligned);
        }
        if last_page(pa.get(), pages) >> (self.format.physical_bits() - PAGE.shift()) != 0 {
            return Err(MapError::PhysicalBeyondWidth { at: pa });
        }
        Ok(())
    }

    /// Fills the entries of a leaf table from `at` on. Fails without a store if any of them is
    /// present.
    #[inline(always)]
    pub(crate) fn store_leaf_entries<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        at: PhysAddr,
        request: &MapRequest,
        write_back: &mut impl WriteBackPolicy,
    ) -> Result<(), MapError> {
        let iova = request.iova;
        let leaf = self
            .format
            .leaf(Level::LEAF, request.pa, request.permissions);
        if request.pages == F::GRANULE.granules() {
            let word = mem.word(at).map_err(|_| MapError::Corrupt { iova })?;
            if !self.format.is_absent(word.load(Ordering::Relaxed)) {
                return Err(MapError::AlreadyMapped { iova });
            }
            word.store(leaf, Ordering::Release);
            write_back.touched(mem, at, 8);
            return Ok(());
        }
        self.fill_run(mem, at, request)?;
        let entries = Self::leaf_entries(request.pages);
        write_back.touched(mem, at, entries.wrapping_mul(8));
        Ok(())
    }

    /// [`store_leaf_entries`](Self::store_leaf_entries) for several pages.
    #[inline(always)]
    fn fill_run<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        at: PhysAddr,
        request: &MapRequest,
    ) -> Result<(), MapError> {
        let words = self.leaf_words(mem, at, request)?;
        self.check_absent(words, request)?;
        self.store_run(words, request);
        Ok(())
    }

    #[inline]
    fn check_absent(&self, words: &[AtomicU64], request: &MapRequest) -> Result<(), MapError> {
        let format = self.format;
        // Test the OR of all entries (contract of `Format`). Search one by one only for the error.
        let all = words
            .iter()
            .fold(0, |all, word| all | word.load(Ordering::Relaxed));
        if format.is_absent(all) {
            return Ok(());
        }
        let taken = words
            .iter()
            .position(|word| !format.is_absent(word.load(Ordering::Relaxed)))
            .unwrap_or_default();
        Err(MapError::AlreadyMapped {
            iova: request.after(Self::leaf_pages(taken as u64)).iova,
        })
    }

    #[inline]
    fn leaf_words<'m, M: PhysMemory + ?Sized>(
        &self,
        mem: &'m M,
        at: PhysAddr,
        request: &MapRequest,
    ) -> Result<&'m [AtomicU64], MapError> {
        mem.words(at, Self::leaf_entries(request.pages) as usize)
            .map_err(|_| MapError::Corrupt { iova: request.iova })
    }

    #[inline]
    fn store_run(&self, words: &[AtomicU64], request: &MapRequest) {
        if self.may_have_runs(request) {
            return self.store_runs(words, request);
        }
        // Copy the format: through `self`, the compiler reloads it after every store.
        let (format, permissions) = (self.format, request.permissions);
        Self::store_series(words, request.pa, F::GRANULE.shift(), |at| {
            format.leaf(Level::LEAF, at, permissions)
        });
    }

    /// Maps a range that needs new tables, spans several tables, or uses larger pages. Checks the
    /// whole range and reserves the frames first; the installation then cannot fail.
    #[cold]
    #[inline(never)]
    fn map_long<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        frames: &S,
        request: &MapRequest,
        write_back: &mut impl WriteBackPolicy,
        entry_count: impl EntryCount<F>,
    ) -> Result<(), MapError> {
        let mut reserve = FrameReserve::new(F::GRANULE, mem, frames);
        self.check_long(mem, &mut reserve, request)?;
        let mut done = 0;
        while done < request.pages {
            let rest = request.after(done);
            match self.install_step(mem, &mut reserve, &rest, write_back, entry_count) {
                Ok(pages) => done = done.saturating_add(pages.max(1)),
                Err(error) => {
                    // Reached only if another CPU breaks the contract and works on the same range,
                    // or if something overwrites the table. Clear the installed leaves. Tables
                    // linked so far stay linked and empty.
                    self.clear_installed(mem, request, done, write_back, entry_count);
                    write_back.finish(mem);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Checks that every page of `request` is absent, and reserves a frame for each missing table.
    /// Stores nothing in the table. The first frame that is not available ends the check, so its
    /// time is linear in the frames and tables that exist, not in the pages of the request.
    fn check_long<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        reserve: &mut FrameReserve<'_, M, S>,
        request: &MapRequest,
    ) -> Result<(), MapError> {
        let mut done = 0;
        let mut lookups = 0;
        while done < request.pages {
            let rest = request.after(done);
            let iova = rest.iova;
            let corrupt = MapError::Corrupt { iova };
            let lowest = self.walk_linked(mem, iova).map_err(|Corrupt| corrupt)?;
            let target = self.target(lowest.level, &rest);
            let pages;
            if lowest.level == Level::LEAF {
                pages = rest.pages.min(self.pages_to_end(iova));
                let run = MapRequest { pages, ..rest };
                let words = self.leaf_words(
                    mem,
                    self.entry_address(lowest.level, lowest.table, iova),
                    &run,
                )?;
                self.check_absent(words, &rest)?;
            } else {
                let word = mem
                    .word(self.entry_address(lowest.level, lowest.table, iova))
                    .map_err(|_| corrupt)?;
                match self
                    .format
                    .decode(lowest.level, word.load(Ordering::Acquire))
                {
                    Entry::Absent => {}
                    Entry::Leaf { .. } => return Err(MapError::AlreadyMapped { iova }),
                    // Another CPU has linked a table since. Retry, at most once per level.
                    Entry::Table { .. } if lookups < Level::MAX.get() => {
                        lookups += 1;
                        continue;
                    }
                    Entry::Table { .. } | Entry::Reserved => return Err(corrupt),
                }
                let at = self.entry_address(lowest.level, lowest.table, iova);
                let linked = (target == lowest.level).then_some(at);
                pages = self.step(mem, target, &rest, linked).pages;
                // Reserve a table of an intermediate level when the range first enters it.
                let mut level = target;
                while level < lowest.level {
                    let covers = self.covered_bytes(level);
                    if done == 0 || covers.is_some_and(|covers| iova.is_aligned(covers)) {
                        reserve.grow().map_err(|_| MapError::OutOfFrames)?;
                    }
                    level = match level.above() {
                        Some(above) => above,
                        None => break,
                    };
                }
            }
            done = done.saturating_add(pages.max(1));
            lookups = 0;
        }
        Ok(())
    }

    /// Returns the number of bytes that a whole table of `level` translates; `None` for the 2^64 of
    /// a root of AMD-Vi.
    #[inline]
    pub(crate) fn covered_bytes(&self, level: Level) -> Option<u64> {
        let bits = self.format.entries(level).trailing_zeros();
        1_u64.checked_shl(bits.saturating_add(self.format.shift(level)))
    }

    /// Returns the highest level, at most `from`, at which a leaf can map the start of `rest`.
    fn target(&self, from: Level, rest: &MapRequest) -> Level {
        let mut level = from;
        while let Some(below) = level.below() {
            if let Some(size) = self.format.leaf_size(level)
                && size.granules() <= rest.pages
                && rest.iova.is_aligned(size.bytes())
                && rest.pa.is_aligned(size.bytes())
            {
                return level;
            }
            level = below;
        }
        Level::LEAF
    }

    /// Links missing tables on the path to the first page of `rest`, then installs one step.
    /// Returns the number of pages installed.
    fn install_step<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        reserve: &mut FrameReserve<'_, M, S>,
        rest: &MapRequest,
        write_back: &mut impl WriteBackPolicy,
        entry_count: impl EntryCount<F>,
    ) -> Result<u64, MapError> {
        let iova = rest.iova;
        let corrupt = MapError::Corrupt { iova };
        // Each iteration links one level, or finds that another CPU linked it.
        for _ in 0..=Level::MAX.get() {
            let lowest = self.walk_linked(mem, iova).map_err(|Corrupt| corrupt)?;
            let target = self.target(lowest.level, rest);
            let at = self.entry_address(lowest.level, lowest.table, iova);
            if lowest.level > target {
                self.link(mem, reserve, &lowest, at, entry_count)
                    .map_err(|kind| kind.at(iova))?;
                continue;
            }
            let Step { entries, pages } = self.step(mem, target, rest, Some(at));
            let words = mem.words(at, entries as usize).map_err(|_| corrupt)?;
            if target == Level::LEAF {
                self.store_run(words, rest);
            } else {
                let mut words_now = words.iter();
                let absent = |word: &AtomicU64| self.format.is_absent(word.load(Ordering::Relaxed));
                if !words_now.all(absent) {
                    return Err(MapError::AlreadyMapped { iova });
                }
                let run = words.len().trailing_zeros();
                self.store_leaves(target, words, run, rest);
            }
            write_back.touched(mem, at, entries.wrapping_mul(8));
            entry_count.added(&self.format, lowest.parent, entries);
            return Ok(pages);
        }
        Err(corrupt)
    }

    /// Links a reserved frame at the absent entry at `at`, unless another CPU links one first.
    fn link<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        reserve: &mut FrameReserve<'_, M, S>,
        lowest: &WalkResult<'_>,
        at: PhysAddr,
        entry_count: impl EntryCount<F>,
    ) -> Result<(), LinkError> {
        let word = mem.word(at).map_err(|_| LinkError::Corrupt)?;
        let old = word.load(Ordering::Acquire);
        match self.format.decode(lowest.level, old) {
            Entry::Absent => {}
            Entry::Table { .. } => return Ok(()),
            Entry::Leaf { .. } => return Err(LinkError::AlreadyMapped),
            Entry::Reserved => return Err(LinkError::Corrupt),
        }
        let frame = reserve.take(self.coherency).ok_or(LinkError::OutOfFrames)?;
        let entry = self.format.table(lowest.level, frame);
        // Release: orders the zeroes of the new table before the entry that points to it.
        if word
            .compare_exchange(old, entry, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            reserve.put(frame);
            return Ok(());
        }
        self.frames.fetch_add(1, Ordering::Relaxed);
        if self.coherency == Coherency::NonCoherent {
            self.publish(mem, word, at);
        }
        entry_count.added(&self.format, lowest.parent, 1);
        Ok(())
    }

    /// Clears the leaves of the first `done` pages of `request`.
    fn clear_installed<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        request: &MapRequest,
        done: u64,
        write_back: &mut impl WriteBackPolicy,
        entry_count: impl EntryCount<F>,
    ) {
        let mut cleared = 0;
        while cleared < done {
            let rest = request.after(cleared);
            let Ok(lowest) = self.walk_linked(mem, rest.iova) else {
                return;
            };
            // Take the same steps as the installation: a leaf lies at the level where the linked
            // tables end.
            let at = self.entry_address(lowest.level, lowest.table, rest.iova);
            let left = MapRequest {
                pages: done.saturating_sub(cleared),
                ..rest
            };
            let Step { entries, pages } = self.installed(mem, lowest.level, at, &left);
            if let Ok(words) = mem.words(at, entries as usize) {
                for word in words {
                    word.store(0, Ordering::Release);
                }
                write_back.touched(mem, at, entries.wrapping_mul(8));
                entry_count.removed(&self.format, lowest.parent, entries);
            }
            cleared = cleared.saturating_add(pages.max(1));
        }
    }
}

/// Returns the number of the last of `pages` pages starting at `first`. `pages` must not be zero.
/// In units of pages the sum overflows only for absurd counts; it then saturates.
#[inline(always)]
fn last_page(first: u64, pages: u64) -> u64 {
    (first >> PAGE.shift()).saturating_add(pages.wrapping_sub(1))
}

/// Reason why [`Table::link`] failed.
enum LinkError {
    AlreadyMapped,
    Corrupt,
    OutOfFrames,
}

impl LinkError {
    fn at(self, iova: Iova) -> MapError {
        match self {
            Self::AlreadyMapped => MapError::AlreadyMapped { iova },
            Self::Corrupt => MapError::Corrupt { iova },
            Self::OutOfFrames => MapError::OutOfFrames,
        }
    }
}
