//! A domain: one I/O address space, its table, and the endpoints whose readers walk it.

use std::sync::Arc;

use ringfence_types::{DomainId, IovaRange, PageSize, Permissions, PhysAddr, PhysRange};

use crate::endpoint::Endpoint;
use crate::error::{DomainMapError, DomainMapReason, DomainUnmapError, ReadSectionOpen};
use crate::guard_count;
use crate::leaf_tables::parts;
use crate::qsbr::synchronize;
use crate::sync::{AtomicU64, prefetch_write};
use crate::table::{GRANULE_SHIFT, Leaf, Table, Width, index};
use crate::table_alloc::TableAlloc;

const PAGE: u64 = PageSize::Size4K.bytes();

/// Number of pages of a batch to prefetch before clearing the first: about as many cache lines as a
/// CPU can have outstanding.
const PREFETCH_PAGES: usize = 16;

/// One I/O address space. It never leaves its [`SoftIommu`](crate::SoftIommu), which attaches
/// endpoints and knows which readers to wait for. Callers get a [`DomainMut`](crate::DomainMut).
pub(crate) struct Domain<M> {
    id: DomainId,
    table: Arc<Table>,
    tables: TableAlloc,
    /// Endpoints whose readers may walk the table.
    endpoints: Vec<Arc<Endpoint<M>>>,
}

impl<M> Domain<M> {
    /// Creates a domain; `None` if there is no memory for this many tables.
    pub(crate) fn new(id: DomainId, width: Width, tables: usize) -> Option<Self> {
        Some(Self {
            id,
            table: Arc::new(Table::new(width, tables)?),
            tables: TableAlloc::new(),
            endpoints: Vec::new(),
        })
    }

    pub(crate) fn id(&self) -> DomainId {
        self.id
    }

    pub(crate) fn tables(&self) -> usize {
        self.tables.in_use()
    }

    /// Maps a range as [`DomainMut::map`](crate::DomainMut::map) specifies.
    #[inline]
    pub(crate) fn map(
        &mut self,
        range: IovaRange,
        memory: PhysAddr,
        permissions: Permissions,
    ) -> Result<(), DomainMapError> {
        let domain = self.id;
        let refuse = |reason| DomainMapError {
            domain,
            range,
            reason,
        };
        if guard_count::any_open() {
            return Err(refuse(DomainMapReason::ReadSectionOpen));
        }
        if let Some((at, word)) = self.cached_page(&range)
            && Leaf::peek(word).is_absent()
            && memory.is_aligned(PAGE)
        {
            Leaf::new(memory, permissions).put(word);
            self.tables.filled(at, 1);
            return Ok(());
        }
        self.map_slow(&range, memory, permissions).map_err(refuse)
    }

    /// Returns the entry of the single page `range` and the index of its table's first word. `None`
    /// if `range` is not one page or its table is not cached.
    #[inline]
    fn cached_page(&self, range: &IovaRange) -> Option<(usize, &AtomicU64)> {
        if range.start().is_aligned(PAGE) && range.bytes() == PAGE {
            let start = range.start().get();
            let at = self.tables.cached_table(start)?;
            Some((at, self.table.word(at | index(start, GRANULE_SHIFT))?))
        } else {
            None
        }
    }

    /// Slow path of [`map`](Self::map): any range.
    #[inline(never)]
    fn map_slow(
        &mut self,
        range: &IovaRange,
        memory: PhysAddr,
        permissions: Permissions,
    ) -> Result<(), DomainMapReason> {
        if !is_pages(range) {
            return Err(DomainMapReason::NotPages);
        }
        if !memory.is_aligned(PAGE) || PhysRange::new(memory, range.bytes()).is_none() {
            return Err(DomainMapReason::BadMemory { at: memory });
        }
        if !self.table.width().holds(range) {
            return Err(DomainMapReason::BeyondWidth);
        }
        self.prepare(range)?;
        let mut page = memory;
        for part in parts(range) {
            let Some(at) = self.tables.find_or_link(&self.table, part.start().get()) else {
                debug_assert!(false, "prepared for");
                break;
            };
            page = self.install(at, &part, page, permissions);
        }
        Ok(())
    }

    /// Checks that `install` will succeed: no page is mapped and enough tables are available.
    fn prepare(&mut self, range: &IovaRange) -> Result<(), DomainMapReason> {
        let missing = self.missing(range)?;
        if missing <= self.tables.available(&self.table) {
            return Ok(());
        }
        self.reclaim();
        // More tables may be missing now: `reclaim` may have unlinked empty tables in this range.
        let missing = self.missing(range)?;
        if missing <= self.tables.available(&self.table) {
            Ok(())
        } else {
            Err(DomainMapReason::OutOfTables)
        }
    }

    /// Returns the number of tables that a mapping of `range` lacks. Stops counting above the
    /// capacity.
    fn missing(&self, range: &IovaRange) -> Result<usize, DomainMapReason> {
        let mut missing = 0_usize;
        for chunk in self.table.leaf_tables(range) {
            match chunk.table {
                Ok(at) => vacant(self.table.words(at, &chunk.range), &chunk.range)?,
                Err(hole) => {
                    let tables = usize::try_from(chunk.missing(hole)).unwrap_or(usize::MAX);
                    missing = missing.saturating_add(tables);
                    if missing > self.table.capacity() {
                        break;
                    }
                }
            }
        }
        Ok(missing)
    }

    /// Unlinks empty tables, waits for readers, and frees the tables.
    #[cold]
    fn reclaim(&mut self) {
        let unlinked = self.tables.unlink_empty(&self.table);
        if !unlinked.is_empty() {
            for endpoint in &self.endpoints {
                endpoint.invalidate_walk_caches();
            }
            self.synchronize();
            self.tables.recycle(unlinked);
        }
    }

    /// Maps `part` in the table at `at`. No page of `part` may be mapped. Returns the end of the
    /// mapped memory.
    fn install(
        &mut self,
        at: usize,
        part: &IovaRange,
        memory: PhysAddr,
        permissions: Permissions,
    ) -> PhysAddr {
        let mut page = memory;
        let words = self.table.words(at, part);
        for word in words {
            Leaf::new(page, permissions).put(word);
            page = page.wrapping_add(PAGE);
        }
        self.tables.filled(at, words.len() as u32);
        page
    }

    /// Unmaps a range as [`DomainMut::unmap`](crate::DomainMut::unmap) specifies.
    #[inline]
    pub(crate) fn unmap(&mut self, range: IovaRange) -> Result<u64, DomainUnmapError> {
        if guard_count::any_open() {
            return Err(ReadSectionOpen.into());
        }
        if !is_pages(&range) {
            return Err(DomainUnmapError::NotPages {
                domain: self.id,
                range,
            });
        }
        let pages = self.clear(&range);
        Ok(self.synchronize_if_any(pages))
    }

    /// Unmaps ranges as [`DomainMut::unmap_all`](crate::DomainMut::unmap_all) specifies.
    #[inline]
    pub(crate) fn unmap_all<R>(&mut self, ranges: R) -> Result<u64, DomainUnmapError>
    where
        R: IntoIterator<Item = IovaRange, IntoIter: Clone>,
    {
        if guard_count::any_open() {
            return Err(ReadSectionOpen.into());
        }
        let ranges = ranges.into_iter();
        if let Some(range) = ranges.clone().find(|range| !is_pages(range)) {
            return Err(DomainUnmapError::NotPages {
                domain: self.id,
                range,
            });
        }
        let mut upcoming = ranges.clone();
        upcoming
            .by_ref()
            .take(PREFETCH_PAGES)
            .for_each(|range| self.prefetch_clear(&range));
        let mut pages = 0_u64;
        for range in ranges {
            if let Some(next) = upcoming.next() {
                self.prefetch_clear(&next);
            }
            pages = pages.saturating_add(self.clear(&range));
        }
        Ok(self.synchronize_if_any(pages))
    }

    /// Waits for readers that may hold translations of the `pages` cleared entries. Does not wait
    /// if `pages` is 0.
    #[inline]
    fn synchronize_if_any(&self, pages: u64) -> u64 {
        if pages != 0 {
            self.synchronize();
        }
        pages
    }

    /// Prefetches the entry of `range` for writing.
    #[inline]
    fn prefetch_clear(&self, range: &IovaRange) {
        if let Some((_, word)) = self.cached_page(range) {
            prefetch_write(word);
        }
    }

    /// Clears the entries of `range` and returns how many were present. Readers may still hold
    /// their translations until the caller has waited for readers.
    #[inline]
    pub(crate) fn clear(&mut self, range: &IovaRange) -> u64 {
        if let Some((at, word)) = self.cached_page(range) {
            if !Leaf::clear(word) {
                return 0;
            }
            self.tables.cleared(at, 1);
            return 1;
        }
        self.clear_slow(range)
    }

    #[inline(never)]
    fn clear_slow(&mut self, range: &IovaRange) -> u64 {
        let Some(range) = self.table.width().part(range) else {
            return 0;
        };
        let mut pages = 0_u64;
        let table = Arc::clone(&self.table);
        for chunk in table.leaf_tables(&range) {
            if let Ok(at) = chunk.table {
                pages = pages.saturating_add(self.clear_in(at, &chunk.range));
            }
        }
        pages
    }

    /// Clears the entries of `part` in the table at `at`.
    fn clear_in(&mut self, at: usize, part: &IovaRange) -> u64 {
        let mut cleared = 0_u32;
        for word in self.table.words(at, part) {
            cleared = cleared.saturating_add(u32::from(Leaf::clear(word)));
        }
        if cleared != 0 {
            self.tables.cleared(at, cleared);
        }
        u64::from(cleared)
    }

    /// Waits for the readers of all attached endpoints.
    #[inline]
    fn synchronize(&self) {
        synchronize(self.endpoints.iter().map(|endpoint| endpoint.qsbr()));
    }

    pub(crate) fn table(&self) -> &Arc<Table> {
        &self.table
    }

    pub(crate) fn has_endpoints(&self) -> bool {
        !self.endpoints.is_empty()
    }

    /// Adds `endpoint`, whose readers are about to walk the table.
    pub(crate) fn add(&mut self, endpoint: Arc<Endpoint<M>>) {
        if !self
            .endpoints
            .iter()
            .any(|other| Arc::ptr_eq(other, &endpoint))
        {
            self.endpoints.push(endpoint);
        }
    }

    /// Keeps only the endpoints for which `attached` returns true. The readers of the others must
    /// no longer walk the table.
    pub(crate) fn retain(&mut self, attached: impl Fn(&Arc<Endpoint<M>>) -> bool) {
        self.endpoints.retain(attached);
    }
}

/// Checks that none of `words`, the entries of `range`, is present.
#[inline]
fn vacant(words: &[AtomicU64], range: &IovaRange) -> Result<(), DomainMapReason> {
    match words.iter().position(|word| !Leaf::peek(word).is_absent()) {
        Some(page) => Err(DomainMapReason::Mapped {
            iova: range.start().wrapping_add(page as u64 * PAGE),
        }),
        None => Ok(()),
    }
}

/// Returns true if `range` consists of whole pages.
#[inline]
fn is_pages(range: &IovaRange) -> bool {
    range.start().is_aligned(PAGE) && range.last().offset_in(PAGE) == PAGE - 1
}
