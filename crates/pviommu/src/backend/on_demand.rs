//! Guest memory that gets its frames when it is used: the second stage, walked in memory (sections
//! 4.1 to 4.3 and 4.6; PV10).

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;

use ringfence_pgtable::{
    Coherency, Cursor, Entry, Format, Level, MapError, MapRequest, Reclaim, ReclaimingTable,
    SecondStage, TableError, UnlinkedTables, WalkErrorKind, walk,
};
use ringfence_types::{
    AddressRange, CachedLevels, DomainId, FrameSource, Invalidation, Invalidator, Iova,
    Permissions, Pfn, PfnRange, PhysAddr, PhysMemory,
};

use super::invalidate::invalidate;
use super::{GuestBacking, LastTable, PagePool, PinError};
use crate::wire::{Gpa, GuestPhysical, PAGE_BYTES};

/// Brings back what a page held before its frame was reclaimed.
pub trait Pager {
    /// Fills `frame`, which reads zero, with what `page` held; leaves it if `page` was never used.
    fn load(&mut self, page: Gpa, frame: PhysAddr);
}

/// Pages that were given up hold nothing: a balloon's.
impl Pager for () {
    fn load(&mut self, _page: Gpa, _frame: PhysAddr) {}
}

/// What was done for a guest's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OnDemandStats {
    /// Pages whose entry was found through the last table.
    pub last_table_hits: u64,
    /// Walks of the second stage.
    pub walks: u64,
    /// Words of the second stage that finding entries has read; what entering a frame reads is not
    /// in it.
    pub reads: u64,
    /// Frames given to pages that had none.
    pub allocated: u64,
    /// Frames taken from pages.
    pub reclaimed: u64,
}

/// Why there is no such memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SetupError {
    /// A range is misaligned, or there is no memory to count its pins.
    Range,
    /// The second stage's root.
    Table(TableError),
}

/// Why a frame was not reclaimed. The page has it still, if it had one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReclaimError {
    /// The page is no memory of this machine.
    NotMemory,
    /// Devices reach the page.
    Mapped {
        /// Through that many mappings.
        mappings: u32,
    },
    /// The page has no frame.
    NotPresent,
    /// The guest's processors may still reach it: the invalidation failed.
    NotInvalidated,
    /// The second stage is not as it was written.
    Corrupt,
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range => f.write_str("no usable range of guest memory"),
            Self::Table(error) => error.fmt(f),
        }
    }
}

impl fmt::Display for ReclaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMemory => f.write_str("no memory of this machine"),
            Self::Mapped { mappings } => write!(f, "devices reach it by {mappings} mappings"),
            Self::NotPresent => f.write_str("the page has no frame"),
            Self::NotInvalidated => f.write_str("the invalidation failed"),
            Self::Corrupt => f.write_str("the second stage is corrupt"),
        }
    }
}

impl core::error::Error for SetupError {}
impl core::error::Error for ReclaimError {}

/// A range of guest memory, and how often each of its pages is pinned.
#[derive(Debug)]
struct Region {
    range: AddressRange<GuestPhysical>,
    pins: Vec<u32>,
}

/// Guest memory over a second-stage table, with the pool of section 4.6 and a pointer `K` to the
/// last table.
#[derive(Debug)]
pub struct OnDemand<M, S: FrameSource, K, P = ()> {
    memory: M,
    /// Frames for tables.
    tables: S,
    /// Frames for the guest.
    pool: PagePool<S>,
    second_stage: ReclaimingTable<SecondStage>,
    last: K,
    pager: P,
    regions: Vec<Region>,
    /// Table pages of the last reclaim, if the walk caches could not be told of them.
    not_invalidated: Option<UnlinkedTables>,
    stats: OnDemandStats,
}

impl<M: PhysMemory, S: FrameSource, K: LastTable, P: Pager> OnDemand<M, S, K, P> {
    /// Guest memory at `ranges`, whole pages each, without a frame. Tables come from `tables`, the
    /// guest's frames from `frames`; `domain` tags what the guest's processors cache of the second
    /// stage.
    ///
    /// # Errors
    /// [`SetupError`].
    #[expect(clippy::too_many_arguments, reason = "ports, each of its own kind")]
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
            let whole = range.start().is_aligned(PAGE_BYTES)
                && range.bytes().is_multiple_of(PAGE_BYTES)
                && range.last().get() >> format.width() == 0;
            let count = usize::try_from(pages).map_err(|_| SetupError::Range)?;
            let mut probe: Vec<u32> = Vec::new();
            if !whole || probe.try_reserve_exact(count).is_err() {
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
        let reclaim = Reclaim::FlushTouched;
        let second_stage =
            ReclaimingTable::new(format, domain, coherency, reclaim, &memory, &tables)
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

    /// Without the pool of section 4.6: each frame is asked of the host when a page needs it.
    #[must_use]
    pub fn without_pool(mut self) -> Self {
        self.pool.close();
        self
    }

    /// The frame behind the page that `page` lies in, which gets one if it has none: what a guest's
    /// processor asks for that met an absent entry. It is not pinned.
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

    /// Takes the frame of the page that `page` lies in away, while the guest runs. It is the
    /// caller's now: to be saved, for [`Pager::load`], and to be freed into the source of frames.
    ///
    /// # Errors
    /// [`ReclaimError`]. A page that a device reaches keeps its frame (attack A32).
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
            // The processors may still use the frame: it stays behind the page. The tables that
            // lead there are linked, so none is needed.
            let request = MapRequest {
                iova: address,
                pa: frame,
                pages: 1,
                permissions: Permissions::READ_WRITE,
            };
            let back = self.second_stage.map(&self.memory, &self.tables, request);
            return Err(back.map_or(ReclaimError::Corrupt, |()| ReclaimError::NotInvalidated));
        }
        if self.second_stage.unlink(&self.memory, range) == CachedLevels::All {
            self.last.freed();
            self.not_invalidated = Some(self.second_stage.take_unlinked());
            // The frame is out of reach, whatever becomes of these: the next reclaim tries again
            // first.
            let _ = self.free_unlinked(processors, pages(CachedLevels::All));
        }
        self.stats.reclaimed += 1;
        Ok(frame)
    }

    /// How often a page is pinned; `None` if it is no memory.
    pub fn pinned(&self, page: Gpa) -> Option<u32> {
        let (region, index) = self.region_index(page)?;
        self.regions.get(region)?.pins.get(index).copied()
    }

    /// What was done so far.
    pub const fn stats(&self) -> &OnDemandStats {
        &self.stats
    }

    /// The pool.
    pub const fn pool(&self) -> &PagePool<S> {
        &self.pool
    }

    /// The second stage's root, for the guest's processors.
    pub const fn root(&self) -> PhysAddr {
        self.second_stage.root()
    }

    /// Waits for `request`, then frees the table pages that were unlinked.
    ///
    /// # Errors
    /// They stay.
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

    /// The region and the number of the page in it.
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

    /// Section 4.6: first the last table, then a walk; where no frame is, one from the pool.
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
            // The table that the entry is in is known, and stays what it is.
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
        // Twice at most: the second time the page has its frame, and a last table.
        for _ in 0..2 {
            // The root is read, and each table that an entry leads to.
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

    /// Gives the page a frame.
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
