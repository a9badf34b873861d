//! Page tables that free empty table pages, as FreeBSD does (EIOVAR section 7).

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{
    Batch, CachedLevels, DomainId, Flushed, FrameSource, Invalidation, Iova, PageSize, Pfn,
    PfnRange, PhysAddr, PhysMemory, Unmapped, WholeDomain,
};

use crate::entry_count::{CountInParent, EntryCount};
use crate::write_back::{ImmediateWriteBack, WriteBackPolicy};
use crate::{Coherency, Format, Leaf, Level, MapError, MapRequest, Table, TableError, UnmapError};

/// Returns the bytes that an unmap writes back after it has stored some at an address: their start
/// and length.
pub type WriteBackSpan = fn(PhysAddr, u64) -> (PhysAddr, u64);

/// Write-back policy of unmap. `None` writes back the cache lines of the cleared entries.
struct UnmapWriteBack(Coherency, Option<WriteBackSpan>);

impl WriteBackPolicy for UnmapWriteBack {
    #[inline]
    fn touched<M: PhysMemory + ?Sized>(&mut self, mem: &M, at: PhysAddr, bytes: u64) {
        let (at, bytes) = match self.1 {
            Some(span) => span(at, bytes),
            None => (at, bytes),
        };
        self.0.write_back(mem, at, bytes);
    }

    #[inline]
    fn finish<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        self.0.drain(mem);
    }
}

/// Unlinked table pages that a walk cache may still point to.
///
/// The frames return to their source only after an invalidation that covers them. Submit the
/// invalidation for a batch that contains this value, then call [`release`](Self::release).
#[must_use = "the frames are lost unless they are released after the invalidation"]
#[derive(Debug, Default, PartialEq, Eq)]
pub struct UnlinkedTables {
    /// The domain, and the smallest range that contains the unmapped ranges that emptied the pages.
    /// `None` if there are no pages.
    scope: Option<(DomainId, PfnRange)>,
    frames: Vec<PhysAddr>,
    /// Count of pending pages, shared with the table.
    pending: PendingCount,
}

/// Number of unlinked pages of one table that a walk cache may still point to. The table and every
/// [`UnlinkedTables`] of it share the counter.
#[derive(Debug, Clone, Default)]
struct PendingCount(Option<Arc<AtomicU64>>);

impl PendingCount {
    #[inline]
    fn count(&self) -> u64 {
        // Acquire pairs with the Release in `remove`: after a count of zero, the walk caches no
        // longer hold the pages.
        self.0
            .as_ref()
            .map_or(0, |count| count.load(Ordering::Acquire))
    }

    fn add(&self) {
        if let Some(count) = &self.0 {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn remove(&self, pages: usize) {
        if let Some(count) = &self.0 {
            count.fetch_sub(pages as u64, Ordering::Release);
        }
    }
}

impl PartialEq for PendingCount {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_ref().map(Arc::as_ptr) == other.0.as_ref().map(Arc::as_ptr)
    }
}

impl Eq for PendingCount {}

impl UnlinkedTables {
    /// Returns true if there are no pages.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the number of pages.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns the pages to the frame source that they came from.
    pub fn release<S: FrameSource + ?Sized>(flushed: Flushed<Self>, frames: &S) {
        let Self {
            frames: mut pages,
            pending,
            ..
        } = flushed.into_batch();
        pending.remove(pages.len());
        // Hostile software may have linked a page twice.
        pages.sort_unstable();
        pages.dedup();
        for page in pages {
            frames.free(page);
        }
    }
}

impl Batch for UnlinkedTables {
    /// Requires an invalidation that includes walk caches. A leaf-only invalidation does not cover
    /// the pages (VT-d invalidation hint IH = 0 is needed).
    fn covered_by(&self, request: &Invalidation) -> bool {
        let Some((domain, range)) = &self.scope else {
            return true;
        };
        request.covers(*domain, range, CachedLevels::All)
    }
}

/// A page table that unlinks table pages when they become empty. It allows one writer at a time,
/// hence `&mut self`; the hardware walks it concurrently.
#[derive(Debug)]
pub struct ReclaimingTable<F> {
    table: Table<F>,
    write_back_span: Option<WriteBackSpan>,
    unlinked_tables: UnlinkedTables,
    /// Smallest range that contains the IOVAs of all pending pages. It may be stale after the last
    /// pending page was released.
    pending_hull: Option<PfnRange>,
}

impl<F: Format> ReclaimingTable<F> {
    /// Creates an empty table. Errors as for [`Table::new`].
    pub fn new<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        format: F,
        domain: DomainId,
        coherency: Coherency,
        mem: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        let table = Table::new(format, domain, coherency, mem, frames)?;
        Ok(Self::of(table))
    }

    /// Creates an empty table whose root lies at `root`. Contract and errors as for [`Table::at`].
    pub fn at<M: PhysMemory + ?Sized>(
        format: F,
        domain: DomainId,
        coherency: Coherency,
        mem: &M,
        root: PhysAddr,
    ) -> Result<Self, TableError> {
        let table = Table::at(format, domain, coherency, mem, root)?;
        Ok(Self::of(table))
    }

    fn of(table: Table<F>) -> Self {
        Self {
            table,
            write_back_span: None,
            unlinked_tables: UnlinkedTables {
                pending: PendingCount(Some(Arc::default())),
                ..UnlinkedTables::default()
            },
            pending_hull: None,
        }
    }

    /// Makes every unmap write back `span` of each store instead of its cache lines alone. `span`
    /// must contain the stored bytes.
    #[must_use]
    pub fn with_write_back(mut self, span: WriteBackSpan) -> Self {
        self.write_back_span = Some(span);
        self
    }

    /// Maps as [`Table::map`] does.
    #[inline]
    pub fn map<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &mut self,
        mem: &M,
        frames: &S,
        request: MapRequest,
    ) -> Result<(), MapError> {
        let write_back = ImmediateWriteBack(self.table.coherency);
        self.table
            .map_with(mem, frames, request, write_back, CountInParent)
    }

    /// Unmaps as [`Table::unmap`] does, and unlinks table pages that become empty.
    ///
    /// Returns [`CachedLevels::All`] if it unlinked pages. Those pages wait in
    /// [`take_unlinked`](Self::take_unlinked) for the invalidation of `range`.
    #[inline]
    pub fn unmap<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        let unmapped = self.clear(mem, range)?;
        Ok((unmapped, self.unlink(mem, range)))
    }

    /// First half of [`unmap`](Self::unmap): clears the leaves and keeps every table page linked.
    /// Until [`unlink`](Self::unlink), the range can be mapped again without a frame.
    #[inline]
    pub fn clear<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        range: PfnRange,
    ) -> Result<Unmapped, UnmapError> {
        let write_back = UnmapWriteBack(self.table.coherency, self.write_back_span);
        let (unmapped, _) = self
            .table
            .unmap_with(mem, range, write_back, CountInParent)?;
        Ok(unmapped)
    }

    /// Second half of [`unmap`](Self::unmap): unlinks the empty table pages on the paths to
    /// `range`.
    #[inline]
    pub fn unlink<M: PhysMemory + ?Sized>(&mut self, mem: &M, range: PfnRange) -> CachedLevels {
        let before = self.unlinked_tables.len();
        let mut write_back = UnmapWriteBack(self.table.coherency, self.write_back_span);
        self.unlink_empty(mem, range, &mut write_back);
        if self.unlinked_tables.len() == before {
            return CachedLevels::Leaves;
        }
        write_back.finish(mem);
        CachedLevels::All
    }

    /// Takes the pages unlinked since the last call. They stay pending until
    /// [released](UnlinkedTables::release). If the caller drops them, they stay pending forever.
    #[inline]
    pub fn take_unlinked(&mut self) -> UnlinkedTables {
        if self.unlinked_tables.is_empty() {
            return UnlinkedTables::default();
        }
        let pending = self.unlinked_tables.pending.clone();
        let next = UnlinkedTables {
            pending,
            ..UnlinkedTables::default()
        };
        core::mem::replace(&mut self.unlinked_tables, next)
    }

    /// Returns true if a walk cache may hold an unlinked page on the path to `range`.
    ///
    /// The hardware may miss a new mapping there until the range is invalidated with
    /// [`CachedLevels::All`]. The driver must not give such an IOVA to a device before that.
    #[inline]
    pub fn is_pending(&self, range: PfnRange) -> bool {
        self.pending_hull.is_some_and(|hull| hull.overlaps(&range))
            && self.unlinked_tables.pending.count() > 0
    }

    /// Returns the leaf that translates `iova`; `None` if the walk fails.
    #[inline]
    pub fn lookup<M: PhysMemory + ?Sized>(&self, mem: &M, iova: Iova) -> Option<Leaf> {
        self.table.lookup(mem, iova)
    }

    /// Returns true if the table holds no leaf. See [`Table::is_empty`].
    pub fn is_empty<M: PhysMemory + ?Sized>(&self, mem: &M) -> bool {
        self.table.is_empty(mem)
    }

    /// Returns the physical address of the root.
    #[inline]
    pub const fn root(&self) -> PhysAddr {
        self.table.root()
    }

    /// Returns the format.
    #[inline]
    pub const fn format(&self) -> &F {
        self.table.format()
    }

    /// Returns the domain-id that tags the translations of this table.
    #[inline]
    pub const fn domain(&self) -> DomainId {
        self.table.domain()
    }

    /// Returns the size of all linked table pages in bytes, including the root.
    #[inline]
    pub fn table_bytes(&self) -> u64 {
        self.table.table_bytes()
    }

    /// Destroys the table as [`Table::destroy`] does. Also frees the pages that
    /// [`take_unlinked`](Self::take_unlinked) has not returned yet.
    ///
    /// # Errors
    /// Returns the table unchanged if `proof` belongs to another domain.
    pub fn destroy<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        self,
        mem: &M,
        frames: &S,
        proof: &Flushed<WholeDomain>,
    ) -> Result<(), Self> {
        let Self {
            table,
            write_back_span,
            unlinked_tables,
            pending_hull,
        } = self;
        match table.destroy(mem, frames, proof) {
            Ok(()) => {
                for frame in unlinked_tables.frames {
                    frames.free(frame);
                }
                Ok(())
            }
            Err(table) => Err(Self {
                table,
                write_back_span,
                unlinked_tables,
                pending_hull,
            }),
        }
    }

    fn unlink_empty<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        range: PfnRange,
        write_back: &mut impl WriteBackPolicy,
    ) {
        let end = range.hi().iova();
        let mut at = Some(range.lo().iova());
        while let Some(iova) = at
            && iova <= end
        {
            let covers = self.unlink_empty_at(mem, iova, range, write_back);
            at = covers.and_then(|covers| iova.align_down(covers).checked_add(covers));
        }
    }

    /// Unlinks the empty tables on the path to `iova`, lowest first. Returns the number of bytes
    /// that the lowest linked table translates; `None` if it is the root and translates them all.
    fn unlink_empty_at<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        iova: Iova,
        range: PfnRange,
        write_back: &mut impl WriteBackPolicy,
    ) -> Option<u64> {
        let format = self.table.format;
        let mut path: [Option<(&AtomicU64, PhysAddr, PhysAddr)>; DEPTH] = [None; DEPTH];
        let mut level = format.root_level();
        let mut table = self.table.root;
        for step in &mut path {
            let at = table.wrapping_add((format.index(level, iova) as u64).wrapping_mul(8));
            let (Some(below), Ok(word)) = (level.below(), mem.word(at)) else {
                break;
            };
            // Map and unmap follow no other entries either.
            let Some(next) = format.descend(level, word.load(Ordering::Acquire)) else {
                break;
            };
            *step = Some((word, at, next));
            (level, table) = (below, next);
        }
        let covers = self.table.covered_bytes(level);
        let mut lower = path.iter().rev().flatten().peekable();
        while let Some((word, at, page)) = lower.next() {
            let Some(span) = self.table.covered_bytes(level) else {
                break;
            };
            let first = Pfn::containing(iova.align_down(span));
            let translates = PfnRange::new(first, span >> PageSize::Size4K.shift());
            if !self.is_unused(mem, level, word, *page)
                || !self.note_unlinked(*page, range, translates.unwrap_or(range))
            {
                break;
            }
            level = level.above().unwrap_or(level);
            // Clear the entry first. The page stays readable until the walk caches no longer hold
            // it.
            word.store(0, Ordering::Release);
            write_back.touched(mem, *at, 8);
            let above = lower.peek().map(|(word, ..)| *word);
            CountInParent.removed(&format, above, 1);
        }
        covers
    }

    /// Returns true if the table of `level` at `page` has no present entry. `word` points to it.
    /// Reads the table if the format has no room for the count.
    #[inline]
    fn is_unused<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        level: Level,
        word: &AtomicU64,
        page: PhysAddr,
    ) -> bool {
        let format = self.table.format;
        if F::COUNTS {
            return format.live(word.load(Ordering::Relaxed)) == 0;
        }
        self.table.are_absent(mem, page, format.entries(level))
    }

    /// Records `page` as unlinked. `translates` is the range that the page covered; `range` is the
    /// unmapped range that emptied it.
    ///
    /// Returns false if there is no memory for the record; the page must then stay linked.
    fn note_unlinked(&mut self, page: PhysAddr, range: PfnRange, translates: PfnRange) -> bool {
        let pages = &mut self.unlinked_tables;
        if pages.frames.try_reserve(1).is_err() {
            return false;
        }
        pages.frames.push(page);
        let scope = pages.scope.map(|(_, old)| old);
        pages.scope = Some((self.table.domain(), hull(scope, range)));
        // Update the hull and the count before the caller clears the entry that points to the page.
        let before = self.pending_hull.filter(|_| pages.pending.count() > 0);
        pages.pending.add();
        self.pending_hull = Some(hull(before, translates));
        self.table.frames.fetch_sub(1, Ordering::Relaxed);
        true
    }
}

/// Returns the smallest range that contains both.
fn hull(one: Option<PfnRange>, other: PfnRange) -> PfnRange {
    one.and_then(|one| PfnRange::inclusive(one.lo().min(other.lo()), one.hi().max(other.hi())))
        .unwrap_or(other)
}

/// Number of entries on the longest path: one for each level above the leaves.
const DEPTH: usize = Level::MAX.get() as usize - 1;
