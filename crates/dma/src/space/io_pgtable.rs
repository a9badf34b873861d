//! The page table as the mapping layer uses it.

use ringfence_pgtable::{
    DirtyLines, Format, LeafCache, MapError, MapRequest, ReclaimingTable, Table, UnlinkedTables,
    UnmapError,
};
use ringfence_types::{
    Batch, CachedLevels, DomainId, Flushed, Invalidation, InvalidationError, Lock, Pending, Pfn,
    PfnRange, PhysAddr, Unmapped,
};

use crate::Platform;

/// What the hardware looks up (question 2 of a mode), for spaces whose addresses come from an
/// allocator.
///
/// On a platform whose walker does not snoop, [`map`](Self::map) leaves the entries in memory;
/// entries of [`map_nosync`](Self::map_nosync) and [`unmap`](Self::unmap) get there with
/// [`sync`](Self::sync).
pub trait IoPageTable {
    /// One processor's part.
    type PerCpu;
    /// Table pages that unmap may take away.
    type Pages: TablePages;

    /// A handle for one more processor.
    fn per_cpu(&self) -> Self::PerCpu;

    /// The domain that tags the translations.
    fn domain(&self) -> DomainId;

    /// Installs a run of pages.
    ///
    /// # Errors
    /// Nothing has changed.
    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError>;

    /// Installs a run of pages of which the device is not told before [`sync`](Self::sync).
    ///
    /// # Errors
    /// Nothing has changed.
    fn map_nosync<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.map(cpu, platform, request)
    }

    /// Makes sure that no walk cache hides what was just mapped at `range`, before a device is told
    /// of it.
    ///
    /// # Errors
    /// An invalidation failed: the mapping may be hidden.
    #[inline]
    fn iotlb_sync_map<P: Platform>(
        &self,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        let _ = (platform, range);
        Ok(())
    }

    /// Clears the leaves of `range`; [`sync`](Self::sync) comes before the invalidation.
    ///
    /// # Errors
    /// Nothing has changed.
    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, Self::Pages), UnmapError>;

    /// Clears the leaves of several ranges, and gives what comes of each to `each`. For tables that
    /// are asked to, in one request.
    ///
    /// # Errors
    /// One was refused: it and those after it are as before. Those before it are cleared, and were
    /// given to `each`.
    fn unmap_many<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        ranges: &[PfnRange],
        mut each: impl FnMut((Unmapped, CachedLevels, Self::Pages)),
    ) -> Result<(), UnmapError> {
        for range in ranges {
            each(self.unmap(cpu, platform, *range)?);
        }
        Ok(())
    }

    /// Whether `page` has a leaf; `None` if this processor cannot read the table. Then
    /// [`unmap`](Self::unmap) does not refuse what is not mapped either.
    fn is_mapped<P: Platform>(&self, platform: &P, page: Pfn) -> Option<bool> {
        let _ = (platform, page);
        None
    }

    /// Whether it holds no leaf. Reads every table: for when a domain goes away.
    fn is_empty<P: Platform>(&self, platform: &P) -> bool;

    /// Waits until everything deferred is in memory.
    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P);
}

/// Table pages on their way back to their source.
pub trait TablePages: Batch + Default {
    /// Whether there can be any.
    const ANY: bool;

    /// Frees them: no walk cache leads to them any more.
    fn release<P: Platform>(flushed: Flushed<Self>, platform: &mut P);
}

impl TablePages for () {
    const ANY: bool = false;

    #[inline]
    fn release<P: Platform>(_flushed: Flushed<()>, _platform: &mut P) {}
}

impl TablePages for UnlinkedTables {
    const ANY: bool = true;

    fn release<P: Platform>(flushed: Flushed<Self>, platform: &mut P) {
        Self::release(flushed, platform.frames());
    }
}

/// A table without anything in front.
#[derive(Debug)]
pub struct PlainTable<F>(pub Table<F>);

impl<F: Format> IoPageTable for PlainTable<F> {
    type PerCpu = DirtyLines;
    type Pages = ();

    fn per_cpu(&self) -> DirtyLines {
        DirtyLines::new()
    }

    #[inline]
    fn domain(&self) -> DomainId {
        self.0.domain()
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        _dirty: &mut DirtyLines,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.0.map(platform.memory(), platform.frames(), request)
    }

    #[inline]
    fn map_nosync<P: Platform>(
        &self,
        dirty: &mut DirtyLines,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.0
            .map_nosync(platform.memory(), platform.frames(), request, dirty)
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        dirty: &mut DirtyLines,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        let (unmapped, levels) = self.0.unmap_nosync(platform.memory(), range, dirty)?;
        Ok((unmapped, levels, ()))
    }

    fn is_mapped<P: Platform>(&self, platform: &P, page: Pfn) -> Option<bool> {
        Some(self.0.lookup(platform.memory(), page.iova()).is_some())
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.0.is_empty(platform.memory())
    }

    #[inline]
    fn sync<P: Platform>(&self, dirty: &mut DirtyLines, platform: &mut P) {
        dirty.sync(platform.memory());
    }
}

/// A table whose leaf tables each processor remembers.
#[derive(Debug)]
pub struct CachedTable<F>(pub Table<F>);

impl<F: Format> IoPageTable for CachedTable<F> {
    type PerCpu = (LeafCache, DirtyLines);
    type Pages = ();

    fn per_cpu(&self) -> (LeafCache, DirtyLines) {
        (self.0.leaf_cache(), DirtyLines::new())
    }

    #[inline]
    fn domain(&self) -> DomainId {
        self.0.domain()
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        (cache, _): &mut (LeafCache, DirtyLines),
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        cache.map(&self.0, platform.memory(), platform.frames(), request)
    }

    #[inline]
    fn map_nosync<P: Platform>(
        &self,
        (cache, dirty): &mut (LeafCache, DirtyLines),
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        cache.map_nosync(
            &self.0,
            platform.memory(),
            platform.frames(),
            request,
            dirty,
        )
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        (cache, dirty): &mut (LeafCache, DirtyLines),
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        let (unmapped, levels) = cache.unmap_nosync(&self.0, platform.memory(), range, dirty)?;
        Ok((unmapped, levels, ()))
    }

    fn is_mapped<P: Platform>(&self, platform: &P, page: Pfn) -> Option<bool> {
        Some(self.0.lookup(platform.memory(), page.iova()).is_some())
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.0.is_empty(platform.memory())
    }

    #[inline]
    fn sync<P: Platform>(&self, (_, dirty): &mut (LeafCache, DirtyLines), platform: &mut P) {
        dirty.sync(platform.memory());
    }
}

/// A table that gives empty table pages back, behind the embedder's lock because it has one writer
/// at a time (AL07).
///
/// # Several processors
/// Between the unmap that takes a table page away and the end of its invalidation, a walk cache may
/// still lead to that page. It is not reused before, so nothing unsafe is reached; but a mapping
/// that another processor makes in that time, under a new table page in its place, would fault.
/// Such a map therefore invalidates its own range, walk caches included, before it returns
/// ([`iotlb_sync_map`](IoPageTable::iotlb_sync_map)): installed first and looked at after, because
/// a page that holds a leaf is not taken away. FreeBSD holds one lock over unmap as a whole
/// instead, and makes every processor wait for every invalidation.
#[derive(Debug)]
pub struct Reclaiming<F, L> {
    table: L,
    domain: DomainId,
    format: core::marker::PhantomData<F>,
}

impl<F: Format, L: Lock<ReclaimingTable<F>>> Reclaiming<F, L> {
    /// Puts the lock that `lock` makes around `table`.
    pub fn new(table: ReclaimingTable<F>, lock: impl FnOnce(ReclaimingTable<F>) -> L) -> Self {
        Self {
            domain: table.domain(),
            table: lock(table),
            format: core::marker::PhantomData,
        }
    }

    /// Address of the root.
    pub fn root(&self) -> PhysAddr {
        self.table.with(|table| table.root())
    }

    /// Bytes that the tables take.
    pub fn table_bytes(&self) -> u64 {
        self.table.with(|table| table.table_bytes())
    }
}

impl<F: Format, L: Lock<ReclaimingTable<F>>> IoPageTable for Reclaiming<F, L> {
    type PerCpu = ();
    type Pages = UnlinkedTables;

    fn per_cpu(&self) {}

    #[inline]
    fn domain(&self) -> DomainId {
        self.domain
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        (): &mut (),
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.table
            .with(|table| table.map(platform.memory(), platform.frames(), request))
    }

    #[inline]
    fn iotlb_sync_map<P: Platform>(
        &self,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        if !self.table.with(|table| table.is_pending(range)) {
            return Ok(());
        }
        let request = Invalidation::Pages {
            domain: self.domain,
            range,
            levels: CachedLevels::All,
        };
        // Nothing is released by it.
        Pending::submit(platform.invalidator(), request, ())
            .map_err(|((), error)| error)?
            .wait(platform.invalidator())
            .map(|done| done.into_batch())
            .map_err(|(_, error)| error)
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        (): &mut (),
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, UnlinkedTables), UnmapError> {
        self.table.with(|table| {
            let (unmapped, levels) = table.unmap(platform.memory(), range)?;
            Ok((unmapped, levels, table.take_unlinked()))
        })
    }

    fn is_mapped<P: Platform>(&self, platform: &P, page: Pfn) -> Option<bool> {
        let lookup = |table: &mut ReclaimingTable<F>| table.lookup(platform.memory(), page.iova());
        Some(self.table.with(lookup).is_some())
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.table.with(|table| table.is_empty(platform.memory()))
    }

    #[inline]
    fn sync<P: Platform>(&self, (): &mut (), _platform: &mut P) {}
}
