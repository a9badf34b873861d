//! A domain: one I/O address space, its table, and the endpoints whose readers walk it.

use std::sync::Arc;

use ringfence_types::{DomainId, IovaRange, PageSize, Permissions, PhysAddr, PhysRange};

use crate::chunks::parts;
use crate::endpoint::Endpoint;
use crate::error::{MapError, MapReason, PinHeld, UnmapError};
use crate::gate::settle;
use crate::pinned;
use crate::sync::{AtomicU64, Ordering};
use crate::table::{Leaf, Table, Width};
use crate::tables::Tables;

const PAGE: u64 = PageSize::Size4K.bytes();

/// One I/O address space. Belongs to a [`SoftIommu`](crate::SoftIommu), which attaches endpoints to it.
pub struct Domain<M> {
    id: DomainId,
    table: Arc<Table>,
    tables: Tables,
    /// Whose readers may walk the table.
    endpoints: Vec<Arc<Endpoint<M>>>,
}

impl<M> Domain<M> {
    pub(crate) fn new(id: DomainId, width: Width, tables: usize) -> Self {
        Self {
            id,
            table: Arc::new(Table::new(width, tables)),
            tables: Tables::new(),
            endpoints: Vec::new(),
        }
    }

    /// Its identifier.
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// Tables in use, 4 KiB each, the root included. Never more than [`Limits::tables`](crate::Limits::tables).
    pub fn tables(&self) -> usize {
        self.tables.in_use()
    }

    /// Maps the whole pages of `range` to the memory from `memory` on. When this returns, every access that is ordered after it
    /// is translated: by a doorbell, a channel, or whatever else tells a device's thread of its work.
    ///
    /// All of the range is mapped, or nothing is. Waits for readers only where tables ran out and empty ones can be had back.
    #[inline]
    pub fn map(
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
        if pinned::any() {
            return Err(refuse(MapReason::PinHeld));
        }
        if !is_pages(&range) {
            return Err(refuse(MapReason::NotPages));
        }
        if !memory.is_aligned(PAGE) || PhysRange::new(memory, range.bytes()).is_none() {
            return Err(refuse(MapReason::BadMemory { at: memory }));
        }
        if !self.table.width().holds(&range) {
            return Err(refuse(MapReason::BeyondWidth));
        }
        self.prepare(&range).map_err(refuse)?;
        self.install(&range, memory, permissions);
        Ok(())
    }

    /// Finds out that `install` will succeed: no page is mapped, there are tables.
    #[inline]
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
    #[inline]
    fn missing(&self, range: &IovaRange) -> Result<usize, MapReason> {
        let mut missing = 0_usize;
        for chunk in self.table.chunks(range) {
            match chunk.table {
                Ok(at) => {
                    let mut words = self.table.words(at, &chunk.range);
                    let present = |word: &AtomicU64| word.load(Ordering::Relaxed) != Leaf::ABSENT;
                    if let Some(page) = words.position(present) {
                        let iova = chunk.range.start().wrapping_add(page as u64 * PAGE);
                        return Err(MapReason::Mapped { iova });
                    }
                }
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
            self.settle();
            self.tables.recycle(unlinked);
        }
    }

    #[inline]
    fn install(&mut self, range: &IovaRange, memory: PhysAddr, permissions: Permissions) {
        let mut page = memory;
        for part in parts(range) {
            let Some(at) = self.tables.find_or_link(&self.table, part.start().get()) else {
                debug_assert!(false, "prepared for");
                return;
            };
            let mut entries = 0_u32;
            for word in self.table.words(at, &part) {
                // Release: see R3.
                word.store(Leaf::new(page, permissions).word(), Ordering::Release);
                page = page.wrapping_add(PAGE);
                entries = entries.saturating_add(1);
            }
            self.tables.filled(at, entries);
        }
    }

    /// Unmaps whatever is mapped of the whole pages of `range`. When this returns, no translation of them is to be had, and no
    /// slice that any reader got from one is left. Returns how many pages were mapped.
    ///
    /// Waits for the readers that are online: the next checkpoint of each.
    #[inline]
    pub fn unmap(&mut self, range: IovaRange) -> Result<u64, UnmapError> {
        self.unmap_all([range])
    }

    /// As [`unmap`](Self::unmap) of each of `ranges`, with one wait for all.
    #[inline]
    pub fn unmap_all<R>(&mut self, ranges: R) -> Result<u64, UnmapError>
    where
        R: IntoIterator<Item = IovaRange, IntoIter: Clone>,
    {
        if pinned::any() {
            return Err(PinHeld.into());
        }
        let ranges = ranges.into_iter();
        if let Some(range) = ranges.clone().find(|range| !is_pages(range)) {
            return Err(UnmapError::NotPages {
                domain: self.id,
                range,
            });
        }
        let mut pages = 0_u64;
        for range in ranges {
            pages = pages.saturating_add(self.clear(&range));
        }
        if pages != 0 {
            self.settle();
        }
        Ok(pages)
    }

    /// W1. Clears the entries of `range`; returns how many were present. Readers may hold what they got by them until they have been
    /// waited for.
    #[inline]
    pub(crate) fn clear(&mut self, range: &IovaRange) -> u64 {
        let mut pages = 0_u64;
        let Some(range) = self.table.width().part(range) else {
            return 0;
        };
        for chunk in self.table.chunks(&range) {
            let Ok(at) = chunk.table else {
                continue;
            };
            let mut cleared = 0_u32;
            for word in self.table.words(at, &chunk.range) {
                if word.load(Ordering::Relaxed) != Leaf::ABSENT {
                    // Relaxed: `settle` orders it.
                    word.store(Leaf::ABSENT, Ordering::Relaxed);
                    cleared = cleared.saturating_add(1);
                }
            }
            if cleared != 0 {
                self.tables.cleared(at, cleared);
                pages = pages.saturating_add(u64::from(cleared));
            }
        }
        pages
    }

    /// Waits for the readers of all attached endpoints.
    #[inline]
    fn settle(&self) {
        settle(self.endpoints.iter().map(|endpoint| endpoint.gate()));
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

/// Whether `range` consists of whole pages.
#[inline]
fn is_pages(range: &IovaRange) -> bool {
    range.start().is_aligned(PAGE) && range.last().offset_in(PAGE) == PAGE - 1
}
