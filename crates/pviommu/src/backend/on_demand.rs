//! Guest memory whose frames are allocated on first use: the second stage and its walks (PVIOMMU
//! paper, sections 4.1 to 4.3 and 4.6).

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;

use ringfence_pgtable::{
    Coherency, Cursor, Entry, Format, Level, MapError, MapRequest, ReclaimingTable, SecondStage,
    TableError, UnlinkedTables, WalkErrorKind, walk,
};
use ringfence_types::{
    AddressRange, CachedLevels, DomainId, FrameSource, Invalidation, Invalidator, Iova,
    Permissions, Pfn, PfnRange, PhysAddr, PhysMemory,
};

use super::invalidate::invalidate;
use super::{GuestBacking, LastTable, PagePool, PinError};
use crate::wire::{Gpa, GuestPhysical, PAGE_BYTES};

/// Restores the content of a reclaimed page.
pub trait Pager {
    /// Fills the zeroed `frame` with the content of `page`. Does nothing if `page` was never used.
    fn load(&mut self, page: Gpa, frame: PhysAddr);
}

/// Discards the content of reclaimed pages, like a balloon.
impl Pager for () {
    fn load(&mut self, _page: Gpa, _frame: PhysAddr) {}
}

/// Counters of a guest's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OnDemandStats {
    /// Lookups through the last-table pointer.
    pub last_table_hits: u64,
    /// Walks of the second stage.
    pub walks: u64,
    /// Words of the second stage read to find entries. Reads to install a frame are not counted.
    pub reads: u64,
    /// Frames allocated for pages.
    pub allocated: u64,
    /// Frames reclaimed from pages.
    pub reclaimed: u64,
}

/// Reason why the guest memory cannot be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SetupError {
    /// A range is misaligned, or memory for its pin counts is not available.
    Range,
    /// The second stage's root could not be allocated.
    Table(TableError),
}

/// Reason why a frame was not reclaimed. The page keeps its frame, if it had one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReclaimError {
    /// The page is outside the guest's memory.
    NotMemory,
    /// The page is mapped for devices.
    Mapped {
        /// Number of mappings.
        mappings: u32,
    },
    /// The page has no frame.
    NotPresent,
    /// The invalidation failed, so the guest's vCPUs may still access the frame.
    NotInvalidated,
    /// The second stage is corrupt.
    Corrupt,
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range => {
                f.write_str("the range of guest memory is empty, misaligned or too large")
            }
            Self::Table(error) => error.fmt(f),
        }
    }
}

impl fmt::Display for ReclaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMemory => f.write_str("the page is not guest memory"),
            Self::Mapped { mappings } => write!(f, "{mappings} device mappings pin the page"),
            Self::NotPresent => f.write_str("the page has no frame"),
            Self::NotInvalidated => f.write_str("the invalidation failed"),
            Self::Corrupt => f.write_str("the second stage is corrupt"),
        }
    }
}

impl core::error::Error for SetupError {}
impl core::error::Error for ReclaimError {}

/// A range of guest memory and the pin count of each page.
#[derive(Debug)]
struct Region {
    range: AddressRange<GuestPhysical>,
    pins: Vec<u32>,
}

/// Guest memory over a second-stage table, with the page pool of section 4.6 and a last-table
/// pointer `K`.
#[derive(Debug)]
pub struct OnDemand<M, S: FrameSource, K, P = ()> {
    memory: M,
    /// Frames for tables.
    tables: S,
    /// Frames for guest pages.
    pool: PagePool<S>,
    second_stage: ReclaimingTable<SecondStage>,
    last: K,
    pager: P,
    regions: Vec<Region>,
    /// Unlinked table pages whose invalidation failed.
    not_invalidated: Option<UnlinkedTables>,
    stats: OnDemandStats,
}

impl<M: PhysMemory, S: FrameSource, K: LastTable, P: Pager> OnDemand<M, S, K, P> {
    /// Creates guest memory at `ranges`, each of whole pages, without frames. `tables` provides
    /// frames for tables, `frames` for guest pages. `domain` tags the vCPUs' cached second-stage
    /// translations.
    ///
    /// # Errors
    /// [`SetupError`].
    #[expect(clippy::too_many_arguments, reason = "ports of different kinds")]
    pub fn new(
        memory: M,
        tables: S,
        frames: S,
        format: SecondStage,
        domain: DomainId,
        ranges: &[AddressRange<GuestPhysical>],
        last: K,
        pager: P,
    ) -> Result<Self, SetupError> {
        let region = |range: &AddressRange<GuestPhysical>| {
            let pages = range.bytes() / PAGE_BYTES;
            let valid = range.start().is_aligned(PAGE_BYTES)
                && range.bytes().is_multiple_of(PAGE_BYTES)
                && range.last().get() >> format.width() == 0;
            let count = usize::try_from(pages).map_err(|_| SetupError::Range)?;
            let mut probe: Vec<u32> = Vec::new();
            if !valid || probe.try_reserve_exact(count).is_err() {
                return Err(SetupError::Range);
            }
            drop(probe);
            Ok(Region {
                range: *range,
                pins: vec![0; count],
            })
        };
        let regions = ranges
            .iter()
            .map(region)
            .collect::<Result<_, SetupError>>()?;
        let coherency = Coherency::Coherent;
        let second_stage = ReclaimingTable::new(format, domain, coherency, &memory, &tables)
            .map_err(SetupError::Table)?;
        Ok(Self {
            memory,
            tables,
            pool: PagePool::new(frames),
            second_stage,
            last,
            pager,
            regions,
            not_invalidated: None,
            stats: OnDemandStats::default(),
        })
    }

    /// Disables the page pool of section 4.6. The host then allocates each frame when a page needs
    /// it.
    #[must_use]
    pub fn without_pool(mut self) -> Self {
        self.pool.close();
        self
    }

    /// Returns the frame of the page that contains `page`, and allocates it if absent. Handles a
    /// vCPU's second-stage fault. Does not pin the page.
    ///
    /// # Errors
    /// [`PinError`].
    pub fn resolve(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        let page = page.align_down(PAGE_BYTES);
        if self.pins(page).is_none() {
            return Err(PinError::NotMemory);
        }
        self.frame(page)
    }

    /// Removes the frame of the page that contains `page` while the guest runs. The caller then
    /// owns the frame: it saves the content for [`Pager::load`] and frees the frame to its source.
    ///
    /// # Errors
    /// [`ReclaimError`]. A page mapped for a device keeps its frame.
    pub fn reclaim<I: Invalidator>(
        &mut self,
        page: Gpa,
        processors: &mut I,
    ) -> Result<PhysAddr, ReclaimError> {
        let page = page.align_down(PAGE_BYTES);
        match self.pins(page) {
            None => return Err(ReclaimError::NotMemory),
            Some(0) => {}
            Some(&mut mappings) => return Err(ReclaimError::Mapped { mappings }),
        }
        let domain = Invalidation::Domain(self.second_stage.domain());
        self.free_unlinked(processors, domain)?;
        let address = Iova::new(page.get());
        let leaf = self.second_stage.lookup(&self.memory, address);
        let frame = leaf.ok_or(ReclaimError::NotPresent)?.base;
        let range = PfnRange::new(Pfn::containing(address), 1).ok_or(ReclaimError::NotMemory)?;
        let cleared = self
            .second_stage
            .clear(&self.memory, range)
            .map_err(|_| ReclaimError::Corrupt)?;
        let domain = self.second_stage.domain();
        let pages = |levels| Invalidation::Pages {
            domain,
            range,
            levels,
        };
        if let Err(_cleared) = invalidate(processors, pages(CachedLevels::Leaves), cleared) {
            // The vCPUs may still use the frame, so map it again. The tables are still linked, so
            // the map allocates none.
            let request = MapRequest {
                iova: address,
                pa: frame,
                pages: 1,
                permissions: Permissions::READ_WRITE,
            };
            let restored = self.second_stage.map(&self.memory, &self.tables, request);
            return Err(restored.map_or(ReclaimError::Corrupt, |()| ReclaimError::NotInvalidated));
        }
        if self.second_stage.unlink(&self.memory, range) == CachedLevels::All {
            self.last.freed();
            self.not_invalidated = Some(self.second_stage.take_unlinked());
            // The frame is already inaccessible, even if this fails. The next reclaim retries it
            // first.
            let _ = self.free_unlinked(processors, pages(CachedLevels::All));
        }
        self.stats.reclaimed += 1;
        Ok(frame)
    }

    /// Returns the pin count of a page; `None` if it is outside the guest's memory.
    pub fn pinned(&self, page: Gpa) -> Option<u32> {
        let (region, index) = self.region_index(page)?;
        self.regions.get(region)?.pins.get(index).copied()
    }

    /// Returns the counters.
    pub const fn stats(&self) -> &OnDemandStats {
        &self.stats
    }

    /// The page pool.
    pub const fn pool(&self) -> &PagePool<S> {
        &self.pool
    }

    /// Returns the second stage's root, for the vCPUs.
    pub const fn root(&self) -> PhysAddr {
        self.second_stage.root()
    }

    /// Waits for `request`, then frees the unlinked table pages.
    ///
    /// # Errors
    /// The invalidation failed; the table pages stay.
    fn free_unlinked<I: Invalidator>(
        &mut self,
        processors: &mut I,
        request: Invalidation,
    ) -> Result<(), ReclaimError> {
        let Some(retired) = self.not_invalidated.take() else {
            return Ok(());
        };
        match invalidate(processors, request, retired) {
            Ok(flushed) => {
                UnlinkedTables::release(flushed, &self.tables);
                Ok(())
            }
            Err(retired) => {
                self.not_invalidated = Some(retired);
                Err(ReclaimError::NotInvalidated)
            }
        }
    }

    /// Returns the index of the region and of the page in it.
    #[inline]
    fn region_index(&self, page: Gpa) -> Option<(usize, usize)> {
        let holds = |region: &Region| region.range.contains_address(page);
        let region = self.regions.iter().position(holds)?;
        let bytes = page.offset_from(&self.regions.get(region)?.range.start())?;
        Some((region, (bytes / PAGE_BYTES) as usize))
    }

    #[inline]
    fn pins(&mut self, page: Gpa) -> Option<&mut u32> {
        let (region, index) = self.region_index(page)?;
        self.regions.get_mut(region)?.pins.get_mut(index)
    }

    /// Section 4.6: tries the last table, then walks. Allocates an absent frame from the pool.
    #[inline]
    fn frame(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        let Some(at) = self.last.entry(page) else {
            return self.walk(page);
        };
        let format = *self.second_stage.format();
        let word = self.memory.word(at).map_err(|_| PinError::Corrupt)?;
        self.stats.reads += 1;
        match format.decode(Level::LEAF, word.load(Ordering::Acquire)) {
            Entry::Leaf { base, .. } => {
                self.stats.last_table_hits += 1;
                Ok(base)
            }
            Entry::Absent if K::FILLS_IN_PLACE => {
                let frame = self.pool.alloc().map_err(|_| PinError::NoRoom)?;
                self.pager.load(page, frame);
                let leaf = format.leaf(Level::LEAF, frame, Permissions::READ_WRITE);
                word.store(leaf, Ordering::Release);
                self.stats.last_table_hits += 1;
                self.stats.allocated += 1;
                Ok(frame)
            }
            // The table of the entry is known and does not change.
            Entry::Absent => {
                self.stats.last_table_hits += 1;
                self.populate(page)
            }
            Entry::Table { .. } | Entry::Reserved => Err(PinError::Corrupt),
        }
    }

    fn walk(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        let format = *self.second_stage.format();
        let address = Iova::new(page.get());
        let root = Cursor::root(&format, self.second_stage.root());
        // At most two passes: in the second, the page has a frame and a leaf table.
        for _ in 0..2 {
            // The walk reads the root and each table below it.
            let (mut last, mut reads) = (None, 1);
            let found = walk(&format, &self.memory, root, address, |cursor| {
                reads += 1;
                if cursor.level() == Level::LEAF {
                    last = Some(cursor.table());
                }
            });
            self.stats.walks += 1;
            self.stats.reads += reads;
            let frame = match found {
                Ok(leaf) => leaf.translate(address),
                Err(error) if error.kind == WalkErrorKind::NotPresent => {
                    let frame = self.populate(page)?;
                    if last.is_none() {
                        continue;
                    }
                    frame
                }
                Err(_) => return Err(PinError::Corrupt),
            };
            if let Some(table) = last {
                self.last.learn(page, table);
            }
            return Ok(frame);
        }
        Err(PinError::Corrupt)
    }

    /// Allocates a frame for the page.
    #[cold]
    fn populate(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        let frame = self.pool.alloc().map_err(|_| PinError::NoRoom)?;
        self.pager.load(page, frame);
        let request = MapRequest {
            iova: Iova::new(page.get()),
            pa: frame,
            pages: 1,
            permissions: Permissions::READ_WRITE,
        };
        let mapped = self.second_stage.map(&self.memory, &self.tables, request);
        mapped.map_err(|error| {
            self.pool.free(frame);
            match error {
                MapError::OutOfFrames => PinError::NoRoom,
                _ => PinError::Corrupt,
            }
        })?;
        self.stats.allocated += 1;
        Ok(frame)
    }
}

impl<M: PhysMemory, S: FrameSource, K: LastTable, P: Pager> GuestBacking for OnDemand<M, S, K, P> {
    #[inline]
    fn contains(&self, page: Gpa) -> bool {
        self.region_index(page).is_some()
    }

    #[inline]
    fn pin(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        let pins = self.pins(page).ok_or(PinError::NotMemory)?;
        let more = pins.checked_add(1).ok_or(PinError::NoRoom)?;
        let frame = self.frame(page)?;
        if let Some(pins) = self.pins(page) {
            *pins = more;
        }
        Ok(frame)
    }

    #[inline]
    fn unpin(&mut self, page: Gpa) {
        if let Some(pins) = self.pins(page) {
            *pins = pins.saturating_sub(1);
        }
    }

    #[inline]
    fn maintain(&mut self) {
        self.pool.refill();
    }
}
