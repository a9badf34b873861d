//! The I/O page table as the mapping layer uses it: the tables with and without a leaf cache, and
//! how an unmap submits its invalidation and waits for it.

use ringfence_pgtable::{
    DirtyLines, Format, LeafCache, MapError, MapRequest, ReclaimingTable, Table, UnlinkedTables,
    UnmapError,
};
use ringfence_types::{
    Batch, CachedLevels, DomainId, Flushed, Invalidation, InvalidationError, Lock, Pending, Pfn,
    PfnRange, PhysAddr, Unmapped,
};

use crate::Platform;
use crate::token::ClearedRange;

/// The I/O page table (axis 2 of a mode), for spaces that take their addresses from an
/// allocator.
///
/// For a walker that does not snoop, [`map`](Self::map) writes the entries back to memory before it
/// returns. Entries of [`map_nosync`](Self::map_nosync) and [`unmap`](Self::unmap) reach memory at
/// the next [`sync`](Self::sync).
pub trait IoPageTable {
    /// The state of one CPU.
    type PerCpu;
    /// Table pages that an unmap may unlink.
    type Pages: TablePages;

    /// Creates the state of another CPU.
    fn per_cpu(&self) -> Self::PerCpu;

    /// Returns the domain whose id tags the translations.
    fn domain(&self) -> DomainId;

    /// Installs a run of pages.
    ///
    /// # Errors
    /// Nothing changed.
    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError>;

    /// Like [`map`](Self::map), but the caller must call [`sync`](Self::sync) before a device uses
    /// the addresses.
    ///
    /// # Errors
    /// Nothing changed.
    fn map_nosync<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.map(cpu, platform, request)
    }

    /// Ensures that no walk cache hides the new entries of `range`. Called before the device
    /// receives the addresses.
    ///
    /// # Errors
    /// An invalidation failed. The device may not see the mapping.
    #[inline]
    fn iotlb_sync_map<P: Platform>(
        &self,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        let _ = (platform, range);
        Ok(())
    }

    /// Clears the leaves of `range`. The caller calls [`sync`](Self::sync) before the invalidation.
    ///
    /// # Errors
    /// Nothing changed.
    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, Self::Pages), UnmapError>;

    /// Clears the leaves of several ranges, and passes each result to `each`. A table that another
    /// machine keeps clears them with one request.
    ///
    /// # Errors
    /// A range was rejected: that range and the later ones are unchanged. The earlier ones are
    /// cleared, and `each` has received them.
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

    /// Returns true if `page` has a leaf. `None` if this CPU cannot read the table; then
    /// [`unmap`](Self::unmap) does not reject pages that are not mapped either.
    fn is_mapped<P: Platform>(&self, platform: &P, page: Pfn) -> Option<bool> {
        let _ = (platform, page);
        None
    }

    /// Returns true if the table has no leaf. Reads every table page; used to remove a domain.
    fn is_empty<P: Platform>(&self, platform: &P) -> bool;

    /// Writes all deferred entries back to memory and waits for completion.
    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P);
}

/// Unlinked table pages that wait for their invalidation.
pub trait TablePages: Batch + Default {
    /// True if an unmap can unlink table pages.
    const ANY: bool;

    /// Frees the pages. The proof guarantees that no walk cache refers to them.
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

impl<T: TablePages> ClearedRange<T> {
    /// Submits `request`, which must cover the range, waits for it, and frees the table pages.
    ///
    /// # Errors
    /// Returns the range that still needs an invalidation. Its table pages are leaked.
    #[inline]
    pub(crate) fn invalidate<P: Platform>(
        self,
        request: Invalidation,
        platform: &mut P,
    ) -> Result<Flushed, (InvalidationError, ClearedRange)> {
        let levels = self.levels;
        let left = |unmapped| ClearedRange {
            unmapped,
            levels,
            tables: (),
        };
        let batch = ((self.unmapped, levels), self.tables);
        let pending = match Pending::submit(platform.invalidator(), request, batch) {
            Ok(pending) => pending,
            Err((((unmapped, _), _), error)) => return Err((error, left(unmapped))),
        };
        match pending.wait(platform.invalidator()) {
            Ok(flushed) => {
                let (range, tables) = flushed.split();
                T::release(tables, platform);
                Ok(range.split().0)
            }
            Err((pending, error)) => Err((error, left(pending.abandon().0.0))),
        }
    }
}

/// A table without a leaf cache.
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

/// A table with a leaf cache for each CPU.
#[derive(Debug)]
pub struct LeafCachedTable<F>(pub Table<F>);

impl<F: Format> IoPageTable for LeafCachedTable<F> {
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

/// A table that frees empty table pages. It allows one writer at a time, so the embedder's lock
/// protects it (AL07).
///
/// # Concurrency
/// After an unmap unlinks a table page, a walk cache may refer to that page until its invalidation
/// completes. The page is not reused before, so no device gains access. But another CPU may map in
/// the same range before that, under a new table page, and accesses to that mapping would fault.
/// Such a map therefore invalidates its own range, walk caches included, before it returns
/// ([`iotlb_sync_map`](IoPageTable::iotlb_sync_map)). It checks for this after it has installed the
/// entries, because a table page that holds a leaf is never unlinked. FreeBSD instead holds one
/// lock for the whole unmap, which makes every CPU wait for every invalidation.
#[derive(Debug)]
pub struct Reclaiming<F, L> {
    table: L,
    domain: DomainId,
    format: core::marker::PhantomData<F>,
}

impl<F: Format, L: Lock<ReclaimingTable<F>>> Reclaiming<F, L> {
    /// Wraps `table` in the lock that `lock` creates.
    pub fn new(table: ReclaimingTable<F>, lock: impl FnOnce(ReclaimingTable<F>) -> L) -> Self {
        Self {
            domain: table.domain(),
            table: lock(table),
            format: core::marker::PhantomData,
        }
    }

    /// Returns the address of the root table.
    pub fn root(&self) -> PhysAddr {
        self.table.with(|table| table.root())
    }

    /// Returns the memory used by the tables, in bytes.
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
        // No range depends on this invalidation, so it releases nothing.
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
