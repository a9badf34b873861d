//! A domain: one I/O address space, its table, and the endpoints whose readers walk it.

use std::sync::Arc;

use ringfence_types::{DomainId, IovaRange, PageSize, Permissions, PhysAddr, PhysRange};

use crate::endpoint::Endpoint;
use crate::error::{MapError, MapReason, ReadSectionOpen, UnmapError};
use crate::guard_count;
use crate::leaf_tables::parts;
use crate::qsbr::synchronize;
use crate::sync::{AtomicU64, prefetch_write};
use crate::table::{GRANULE_SHIFT, Leaf, Table, Width, index};
use crate::table_alloc::TableAlloc;

const PAGE: u64 = PageSize::Size4K.bytes();

/// Pages of a batch whose entries are asked for before the first of them is cleared: about as many
/// lines as a processor waits for at a time.
const PREFETCH_PAGES: usize = 16;

/// One I/O address space. It never leaves its [`SoftIommu`](crate::SoftIommu), which attaches
/// endpoints to it and knows whom to wait for; what others get is a
/// [`DomainMut`](crate::DomainMut).
pub(crate) struct Domain<M> {
    id: DomainId,
    table: Arc<Table>,
    tables: TableAlloc,
    /// Whose readers may walk the table.
    endpoints: Vec<Arc<Endpoint<M>>>,
}

impl<M> Domain<M> {
    /// `None` where there is no memory for so many tables.
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

    /// [`DomainMut::map`](crate::DomainMut::map).
    #[inline]
    pub(crate) fn map(
        &mut self,
        range: IovaRange,
        memory: PhysAddr,
        permissions: Permissions,
    ) -> Result<(), MapError> {
        let domain = self.id;
        let refuse = |reason| MapError {
            domain,
            range,
            reason,
        };
        if guard_count::any_open() {
            return Err(refuse(MapReason::ReadSectionOpen));
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

    /// The word of the one page that `range` is, if its table is at hand, and the index of the
    /// table's first word.
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

    /// [`map`](Self::map) in every case.
    #[inline(never)]
    fn map_slow(
        &mut self,
        range: &IovaRange,
        memory: PhysAddr,
        permissions: Permissions,
    ) -> Result<(), MapReason> {
        if !is_pages(range) {
            return Err(MapReason::NotPages);
        }
        if !memory.is_aligned(PAGE) || PhysRange::new(memory, range.bytes()).is_none() {
            return Err(MapReason::BadMemory { at: memory });
        }
        if !self.table.width().holds(range) {
            return Err(MapReason::BeyondWidth);
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

    /// Finds out that `install` will succeed: no page is mapped, there are tables.
    fn prepare(&mut self, range: &IovaRange) -> Result<(), MapReason> {
        let missing = self.missing(range)?;
        if missing <= self.tables.available(&self.table) {
            return Ok(());
        }
        self.reclaim();
        // What was missing may be more now: empty tables in this very range are gone, too.
        let missing = self.missing(range)?;
        if missing <= self.tables.available(&self.table) {
            Ok(())
        } else {
            Err(MapReason::OutOfTables)
        }
    }

    /// How many tables a mapping of `range` lacks; past the capacity, merely more than that.
    fn missing(&self, range: &IovaRange) -> Result<usize, MapReason> {
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

    /// Takes back empty tables.
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

    /// Maps `part`, none of whose pages is mapped, in the table at `at`. Where the memory behind it
    /// ends.
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

    /// [`DomainMut::unmap`](crate::DomainMut::unmap).
    #[inline]
    pub(crate) fn unmap(&mut self, range: IovaRange) -> Result<u64, UnmapError> {
        if guard_count::any_open() {
            return Err(ReadSectionOpen.into());
        }
        if !is_pages(&range) {
            return Err(UnmapError::NotPages {
                domain: self.id,
                range,
            });
        }
        let pages = self.clear(&range);
        Ok(self.synchronize_if_any(pages))
    }

    /// [`DomainMut::unmap_all`](crate::DomainMut::unmap_all).
    #[inline]
    pub(crate) fn unmap_all<R>(&mut self, ranges: R) -> Result<u64, UnmapError>
    where
        R: IntoIterator<Item = IovaRange, IntoIter: Clone>,
    {
        if guard_count::any_open() {
            return Err(ReadSectionOpen.into());
        }
        let ranges = ranges.into_iter();
        if let Some(range) = ranges.clone().find(|range| !is_pages(range)) {
            return Err(UnmapError::NotPages {
                domain: self.id,
                range,
            });
        }
        let mut ahead = ranges.clone();
        ahead
            .by_ref()
            .take(PREFETCH_PAGES)
            .for_each(|range| self.prefetch_clear(&range));
        let mut pages = 0_u64;
        for range in ranges {
            if let Some(next) = ahead.next() {
                self.prefetch_clear(&next);
            }
            pages = pages.saturating_add(self.clear(&range));
        }
        Ok(self.synchronize_if_any(pages))
    }

    /// Waits for whoever may hold what he got by the entries of `pages` pages that were cleared.
    #[inline]
    fn synchronize_if_any(&self, pages: u64) -> u64 {
        if pages != 0 {
            self.synchronize();
        }
        pages
    }

    /// `range` is going to be cleared.
    #[inline]
    fn prefetch_clear(&self, range: &IovaRange) {
        if let Some((_, word)) = self.cached_page(range) {
            prefetch_write(word);
        }
    }

    /// Clears the entries of `range`; returns how many were present. Readers may hold what they got
    /// by them until they have been waited for.
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

    /// Clears the entries of the pages of `part` in the table at `at`.
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

    /// The readers of `endpoint` are going to walk the table.
    pub(crate) fn add(&mut self, endpoint: Arc<Endpoint<M>>) {
        if !self
            .endpoints
            .iter()
            .any(|other| Arc::ptr_eq(other, &endpoint))
        {
            self.endpoints.push(endpoint);
        }
    }

    /// The readers of all other endpoints no longer walk the table.
    pub(crate) fn retain(&mut self, attached: impl Fn(&Arc<Endpoint<M>>) -> bool) {
        self.endpoints.retain(attached);
    }
}

/// Whether none of `words`, those of `range`, is present.
#[inline]
fn vacant(words: &[AtomicU64], range: &IovaRange) -> Result<(), MapReason> {
    match words.iter().position(|word| !Leaf::peek(word).is_absent()) {
        Some(page) => Err(MapReason::Mapped {
            iova: range.start().wrapping_add(page as u64 * PAGE),
        }),
        None => Ok(()),
    }
}

/// Whether `range` consists of whole pages.
#[inline]
fn is_pages(range: &IovaRange) -> bool {
    range.start().is_aligned(PAGE) && range.last().offset_in(PAGE) == PAGE - 1
}
