//! Maps a mode to the types that implement it.
//!
//! [`dispatch`] monomorphises the visitor for each named mode; timed replays use these types.
//! Oracle replays use [`dispatch_dyn`], which shares types between modes to save compile time.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ringfence_dma::flush::{
    Burst, BurstAsPublished, Deferred, FlushQueue, PerCpuQueue, PerWrap, QueueConfig, Strict,
};
use ringfence_dma::ring::{RingAsPublished, SlotChoice};
use ringfence_dma::space::{CachedTable, IoPageTable, PlainTable, Reclaiming, Rounding};
use ringfence_hw::{FixedLogic, LogicAsPublished, RingLogic};
use ringfence_iova::{
    Bitmap, BitmapState, CachedTree, Capacity, Depot, Eiovar, FreeBsdTree, LinuxRcache, Locked,
    MagazineLimits, Magazines, RcacheShared, TableBitmap, TableCursor,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    CalgaryTce, Coherency, Levels, Reclaim, ReclaimingTable, SecondStage, Table, TableError,
};
use ringfence_types::{DomainId, PageSize, Pfn, PfnRange, PhysAddr};

use crate::dynamic;
use crate::error::LabError;
use crate::guest::{self, PviommuTable, RtcParts, VirtioTable, pviommu};
use crate::hardware::{Calgary, Hardware, Vtd};
use crate::meter::{FlushFor, FlushForRings, ReplayAlloc, ReplayRing, StaticStubs};
use crate::modes::{Alloc, FlushKind, Mode, Owner, TableKind};
use crate::ring::RingParts;

/// An I/O page table that a replay can use.
pub trait ReplayTable: IoPageTable + Sized + 'static {
    /// The hardware that walks the table.
    type Hardware: Hardware;

    /// The highest page that the table translates.
    const LAST_PAGE: u64 = LAST_PAGE_48_BIT;

    /// Returns the address at which the hardware starts its walk.
    fn root(&self) -> PhysAddr;
}

/// The owner of a table: the layer itself or a host.
pub type HostOf<T> = <<T as ReplayTable>::Hardware as Hardware>::Host;

/// Creates the empty table of a domain. A host, if the mode has one, owns it. Fails if memory is
/// short.
pub type MakeTable<T> =
    fn(DomainId, Coherency, &Arena, &Frames<Rc<Arena>>, Option<&HostOf<T>>) -> Result<T, LabError>;

/// Creates the allocator of a domain. Fails if memory is short.
pub type MakeAlloc<A> = fn(&AllocEnv<'_>) -> Result<A, LabError>;

/// Returns the format of every radix table of a replay: four levels, like the papers' machine.
fn format() -> SecondStage {
    SecondStage::new(Levels::Four)
}

impl ReplayTable for PlainRadix {
    type Hardware = Vtd;

    fn root(&self) -> PhysAddr {
        self.0.root()
    }
}

impl ReplayTable for LeafCachedRadix {
    type Hardware = Vtd;

    fn root(&self) -> PhysAddr {
        self.0.root()
    }
}

impl ReplayTable for FlatTable {
    type Hardware = Calgary;
    const LAST_PAGE: u64 = LAST_PAGE_32_BIT;

    fn root(&self) -> PhysAddr {
        self.0.root()
    }
}

impl ReplayTable for ReclaimingRadix {
    type Hardware = Vtd;

    fn root(&self) -> PhysAddr {
        Reclaiming::root(self)
    }
}

/// Creates a radix table that never frees table pages.
fn radix(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
) -> Result<Table<SecondStage>, LabError> {
    Ok(Table::new(format(), domain, coherency, memory, frames)?)
}

pub(crate) fn plain_radix(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<PlainRadix, LabError> {
    radix(domain, coherency, memory, frames).map(PlainTable)
}

pub(crate) fn leaf_cached_radix(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<LeafCachedRadix, LabError> {
    radix(domain, coherency, memory, frames).map(CachedTable)
}

pub(crate) fn flat_table(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<FlatTable, LabError> {
    let root = flat_root(frames).ok_or(TableError::OutOfFrames)?;
    let table = Table::at(CalgaryTce::FULL, domain, coherency, memory, root)?;
    Ok(PlainTable(table))
}

/// Creates a table that writes back the whole table page at every unmap, as published.
pub(crate) fn reclaiming_radix_full_page(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<ReclaimingRadix, LabError> {
    let reclaim = Reclaim::FlushPage;
    let table = ReclaimingTable::new(format(), domain, coherency, reclaim, memory, frames)?;
    Ok(Reclaiming::new(table, RefCell::new))
}

/// Creates a table that writes back only the touched lines: the fixed form.
pub(crate) fn reclaiming_radix(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<ReclaimingRadix, LabError> {
    let reclaim = Reclaim::FlushTouched;
    let table = ReclaimingTable::new(format(), domain, coherency, reclaim, memory, frames)?;
    Ok(Reclaiming::new(table, RefCell::new))
}

/// Creates a table that a host behind a virtio-iommu owns.
pub(crate) fn virtio_table(
    domain: DomainId,
    _: Coherency,
    _: &Arena,
    _: &Frames<Rc<Arena>>,
    host: Option<&HostOf<VirtioTable>>,
) -> Result<VirtioTable, LabError> {
    let host = host.ok_or(LabError::Internal("a guest without a host"))?;
    VirtioTable::new(host, domain)
}

/// Allocates the single level of a flat table.
fn flat_root(frames: &Frames<Rc<Arena>>) -> Option<PhysAddr> {
    let bytes = Table::root_bytes_of(&CalgaryTce::FULL);
    let count = bytes.div_ceil(PageSize::Size4K.bytes());
    frames.alloc_contiguous(count).ok()
}

/// The inputs for creating the allocator of a domain.
pub struct AllocEnv<'a> {
    /// The mode's allocator.
    pub kind: Alloc,
    /// The memory of the replay.
    pub memory: &'a Rc<Arena>,
    /// Frames of `memory`.
    pub frames: &'a Frames<Rc<Arena>>,
    /// The root of the domain's table; `None` in the ablation that has no table.
    pub table: Option<PhysAddr>,
    /// The highest page that the table translates.
    pub last_page: u64,
}

/// The constructors of a mode's components.
pub struct ModeParts<A, T: ReplayTable, F> {
    /// Creates the allocator of a domain.
    pub alloc: MakeAlloc<A>,
    /// The mode's allocator.
    pub kind: Alloc,
    /// Creates the flush policy of the unit.
    pub flush: fn() -> F,
    /// The rounding of a request to the reserved size.
    pub rounding: Rounding,
    /// Creates the table of a domain.
    pub table: MakeTable<T>,
}

impl<A, T: ReplayTable, F> Clone for ModeParts<A, T, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, T: ReplayTable, F> Copy for ModeParts<A, T, F> {}

impl<A, T: ReplayTable, F> ModeParts<A, T, F> {
    /// Creates the allocator of a domain with the new, empty `table`. Without a table, the
    /// allocator behaves as if the domain had one.
    ///
    /// # Errors
    /// Memory is short.
    pub fn allocator(
        &self,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        table: Option<&T>,
    ) -> Result<A, LabError> {
        (self.alloc)(&AllocEnv {
            kind: self.kind,
            memory,
            frames,
            table: table.map(T::root),
            last_page: T::LAST_PAGE,
        })
    }
}

/// A computation over the types of a mode.
pub trait ModeVisitor {
    /// Result of the computation, the same type for every mode.
    type Output;
    /// Visits a mode without an allocator.
    fn identity(self, table: TableKind) -> Self::Output;
    /// Visits a mode with an allocator and a table.
    fn paged<A, T, F>(self, recipe: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static;
    /// Visits a mode with a reverse translation cache.
    fn rtc(self, recipe: RtcParts) -> Self::Output;
    /// Visits a mode whose tables are rings.
    fn rings<D, L, F>(self, recipe: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static;
}

/// A cell for state that the CPUs of a replay share. A replay is one thread.
pub type ThreadCell<T> = RefCell<T>;
pub(crate) type RbTreeAlloc = Locked<CachedTree, ThreadCell<CachedTree>>;
pub(crate) type EiovarAlloc = Locked<Eiovar<CachedTree>, ThreadCell<Eiovar<CachedTree>>>;
pub(crate) type BitmapAlloc = Bitmap<ThreadCell<BitmapState>>;
pub(crate) type FreeBsdAlloc = Locked<FreeBsdTree, ThreadCell<FreeBsdTree>>;
pub(crate) type RcacheAlloc = LinuxRcache<CachedTree, ThreadCell<RcacheShared<CachedTree>>>;
pub(crate) type MagazineAlloc = Magazines<ThreadCell<Depot>>;
pub(crate) type DeferredFlush = Deferred<ThreadCell<ringfence_dma::flush::DeferredQueue>>;
pub(crate) type PerCpuFlush =
    PerCpuQueue<ThreadCell<FlushQueue>, ThreadCell<Vec<Arc<ThreadCell<FlushQueue>>>>>;
pub(crate) type PlainRadix = PlainTable<SecondStage>;
pub(crate) type LeafCachedRadix = CachedTable<SecondStage>;
pub(crate) type FlatTable = PlainTable<CalgaryTce>;
pub(crate) type TableBitmapAlloc = TableBitmap<Rc<Arena>, ThreadCell<TableCursor>>;

/// A table that frees empty table pages (FreeBSD).
pub(crate) type ReclaimingRadix = Reclaiming<SecondStage, ThreadCell<ReclaimingTable<SecondStage>>>;

impl StaticStubs for RbTreeAlloc {}
impl StaticStubs for EiovarAlloc {}
impl StaticStubs for BitmapAlloc {}
impl StaticStubs for FreeBsdAlloc {}
impl StaticStubs for RcacheAlloc {}
impl StaticStubs for MagazineAlloc {}

const LAST_PAGE_48_BIT: u64 = (1 << 36) - 1;
/// Fujita and Moriai's bitmap covers 4 GiB, and so does a flat table.
const LAST_PAGE_32_BIT: u64 = (1 << 20) - 1;

impl AllocEnv<'_> {
    /// Returns all pages that the table translates except page 0, which is never handed out.
    fn full_range(&self) -> Result<PfnRange, LabError> {
        self.range_up_to(u64::MAX)
    }

    /// Returns the pages of [`full_range`](Self::full_range) up to `last`.
    fn range_up_to(&self, last: u64) -> Result<PfnRange, LabError> {
        PfnRange::inclusive(Pfn::new(1), Pfn::new(last.min(self.last_page)))
            .ok_or(LabError::Internal("space"))
    }
}

pub(crate) fn rb_tree(site: &AllocEnv<'_>) -> Result<RbTreeAlloc, LabError> {
    Ok(Locked::new(
        CachedTree::new(site.full_range()?),
        RefCell::new,
    ))
}

pub(crate) fn eiovar(site: &AllocEnv<'_>) -> Result<EiovarAlloc, LabError> {
    let capacity = match site.kind {
        Alloc::Eiovar(Some(k)) => Capacity::AtMost(k),
        _ => Capacity::Unbounded,
    };
    let tree = CachedTree::new(site.full_range()?);
    Ok(Locked::new(Eiovar::new(tree, capacity), RefCell::new))
}

pub(crate) fn bitmap(site: &AllocEnv<'_>) -> Result<BitmapAlloc, LabError> {
    Ok(Bitmap::new(
        site.range_up_to(LAST_PAGE_32_BIT)?,
        RefCell::new,
    )?)
}

pub(crate) fn bitmap_as_published(site: &AllocEnv<'_>) -> Result<BitmapAlloc, LabError> {
    Ok(Bitmap::as_published(
        site.range_up_to(LAST_PAGE_32_BIT)?,
        RefCell::new,
    )?)
}

/// Creates the allocator whose bitmap is the table that the hardware reads. Without a table, it
/// allocates entries that no hardware reads.
pub(crate) fn table_bitmap(site: &AllocEnv<'_>) -> Result<TableBitmapAlloc, LabError> {
    let table = site.table.or_else(|| flat_root(site.frames));
    let table = table.ok_or(TableError::OutOfFrames)?;
    let made = TableBitmap::new(
        Rc::clone(site.memory),
        table,
        site.range_up_to(LAST_PAGE_32_BIT)?,
        RefCell::new,
    );
    made.map_err(|_| LabError::Table(TableError::Memory))
}

pub(crate) fn freebsd(site: &AllocEnv<'_>) -> Result<FreeBsdAlloc, LabError> {
    Ok(Locked::new(
        FreeBsdTree::new(site.full_range()?),
        RefCell::new,
    ))
}

pub(crate) fn rcache(site: &AllocEnv<'_>) -> Result<RcacheAlloc, LabError> {
    Ok(LinuxRcache::new(
        CachedTree::new(site.full_range()?),
        RefCell::new,
    ))
}

pub(crate) fn magazine(site: &AllocEnv<'_>) -> Result<MagazineAlloc, LabError> {
    Ok(Magazines::new(
        site.full_range()?,
        MagazineLimits::DEFAULT,
        RefCell::new,
    )?)
}

pub(crate) fn deferred_flush() -> DeferredFlush {
    Deferred::new(RefCell::new)
}

pub(crate) fn per_cpu_flush() -> PerCpuFlush {
    PerCpuQueue::new(QueueConfig::default(), RefCell::new, RefCell::new)
}

/// Calls `job` with the types of `mode`: static types for named modes and for identity, rings and
/// caches, enum-dispatched components (`dynamic/`) for the others.
///
/// # Errors
/// The mode is not built in.
pub fn dispatch<J: ModeVisitor>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    dispatch_static(mode, job).or_else(|job| dispatch_dyn(mode, job))
}

/// Calls `job` with the static types of a named mode that has an allocator and a table.
///
/// # Errors
/// Returns `job` if `mode` is not such a mode.
pub(crate) fn dispatch_static<J: ModeVisitor>(mode: &Mode, job: J) -> Result<J::Output, J> {
    use Rounding::{Exact, PowerOfTwo};
    use {Alloc as A, FlushKind as F, Owner as W, TableKind as T};
    fn recipe<A, T: ReplayTable, F>(
        mode: &Mode,
        alloc: MakeAlloc<A>,
        table: MakeTable<T>,
        flush: fn() -> F,
        rounding: Rounding,
    ) -> ModeParts<A, T, F> {
        ModeParts {
            alloc,
            kind: mode.alloc,
            flush,
            rounding,
            table,
        }
    }
    let strict = || Strict;
    let kernel = match mode.owner {
        W::Kernel | W::Host => (mode.alloc, mode.table, mode.flush),
        W::VirtioIommu => {
            return Ok(match (mode.alloc, mode.table, mode.flush) {
                (A::LinuxRcache, T::Radix, F::PerUnmap) => job
                    .paged::<RcacheAlloc, VirtioTable, Strict>(recipe(
                        mode,
                        rcache,
                        virtio_table,
                        strict,
                        Exact,
                    )),
                (A::LinuxRcache, T::Radix, F::PerCpuQueue) => job
                    .paged::<RcacheAlloc, VirtioTable, PerCpuFlush>(recipe(
                        mode,
                        rcache,
                        virtio_table,
                        per_cpu_flush,
                        Exact,
                    )),
                _ => return Err(job),
            });
        }
        W::Pviommu | W::PviommuHopt => {
            let table = pviommu(mode.owner);
            return Ok(match (mode.alloc, mode.table, mode.flush) {
                (A::LinuxRcache, T::Radix, F::PerUnmap) => job
                    .paged::<RcacheAlloc, PviommuTable, Strict>(recipe(
                        mode, rcache, table, strict, Exact,
                    )),
                _ => return Err(job),
            });
        }
    };
    Ok(match kernel {
        (A::CachedRbTree, T::Radix, F::PerUnmap) => job.paged::<RbTreeAlloc, PlainRadix, Strict>(
            recipe(mode, rb_tree, plain_radix, strict, PowerOfTwo),
        ),
        (A::CachedRbTree, T::Radix, F::Deferred) => job
            .paged::<RbTreeAlloc, PlainRadix, DeferredFlush>(recipe(
                mode,
                rb_tree,
                plain_radix,
                deferred_flush,
                PowerOfTwo,
            )),
        (A::Eiovar(_), T::Radix, F::PerUnmap) => job.paged::<EiovarAlloc, PlainRadix, Strict>(
            recipe(mode, eiovar, plain_radix, strict, PowerOfTwo),
        ),
        (A::Eiovar(_), T::Radix, F::Deferred) => job
            .paged::<EiovarAlloc, PlainRadix, DeferredFlush>(recipe(
                mode,
                eiovar,
                plain_radix,
                deferred_flush,
                PowerOfTwo,
            )),
        (A::Bitmap, T::Radix, F::PerWrap) => job.paged::<BitmapAlloc, PlainRadix, PerWrap>(recipe(
            mode,
            bitmap,
            plain_radix,
            || PerWrap,
            Exact,
        )),
        (A::BitmapAsPublished, T::Radix, F::PerWrap) => job
            .paged::<BitmapAlloc, PlainRadix, PerWrap>(recipe(
                mode,
                bitmap_as_published,
                plain_radix,
                || PerWrap,
                Exact,
            )),
        (A::Bitmap, T::Radix, F::PerUnmap) => job.paged::<BitmapAlloc, PlainRadix, Strict>(recipe(
            mode,
            bitmap,
            plain_radix,
            strict,
            Exact,
        )),
        (A::FreeBsd, T::RadixReclaimPage, F::PerUnmap) => job
            .paged::<FreeBsdAlloc, ReclaimingRadix, Strict>(recipe(
                mode,
                freebsd,
                reclaiming_radix_full_page,
                strict,
                Exact,
            )),
        (A::FreeBsd, T::RadixReclaim, F::PerUnmap) => job
            .paged::<FreeBsdAlloc, ReclaimingRadix, Strict>(recipe(
                mode,
                freebsd,
                reclaiming_radix,
                strict,
                Exact,
            )),
        (A::LinuxRcache, T::Radix, F::PerUnmap) => job.paged::<RcacheAlloc, PlainRadix, Strict>(
            recipe(mode, rcache, plain_radix, strict, Exact),
        ),
        (A::LinuxRcache, T::Radix, F::PerCpuQueue) => job
            .paged::<RcacheAlloc, PlainRadix, PerCpuFlush>(recipe(
                mode,
                rcache,
                plain_radix,
                per_cpu_flush,
                Exact,
            )),
        (A::Magazine, T::CachedRadix, F::PerUnmap) => job
            .paged::<MagazineAlloc, LeafCachedRadix, Strict>(recipe(
                mode,
                magazine,
                leaf_cached_radix,
                strict,
                Exact,
            )),
        (A::Magazine, T::CachedRadix, F::Burst) => job
            .paged::<MagazineAlloc, LeafCachedRadix, Burst>(recipe(
                mode,
                magazine,
                leaf_cached_radix,
                Burst::default,
                Exact,
            )),
        _ => return Err(job),
    })
}

/// Calls `job` with enum-dispatched components, also for named modes. Oracle replays and counters
/// use it, because it compiles them for few types. Rings and caches implement several axes in one
/// object and keep their own types.
///
/// # Errors
/// The mode is not built in.
pub fn dispatch_dyn<J: ModeVisitor>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    if is_special(mode) {
        dispatch_special(mode, job)
    } else {
        dynamic::dispatch(mode, job)
    }
}

/// Returns true if one object implements several axes of the mode: identity, rings or a reverse
/// translation cache.
pub(crate) fn is_special(mode: &Mode) -> bool {
    let cached = matches!(
        mode.flush,
        FlushKind::PerCycle | FlushKind::PerCycleAdaptive | FlushKind::PerCycleAsPublished
    );
    mode.alloc == Alloc::Identity || mode.has_rings() || cached
}

/// Calls `job` with the types of a [special](is_special) mode.
///
/// # Errors
/// The mode is not built in.
pub(crate) fn dispatch_special<J: ModeVisitor>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    use {Coherency as C, TableKind as T};
    match (mode.owner, mode.alloc, mode.table, mode.flush) {
        (Owner::Pviommu | Owner::PviommuHopt, ..) => guest::dispatch(mode, job),
        (Owner::VirtioIommu, ..) => Err(LabError::NotBuilt(mode.name.clone())),
        (_, Alloc::Identity, table, FlushKind::Never) => Ok(job.identity(table)),
        (_, _, T::Ring, _) => rings(mode, C::Coherent, job),
        (_, _, T::RingNonCoherent, _) => rings(mode, C::NonCoherent, job),
        (_, _, T::RingAsPublished, _) => rings_as_published(mode, C::Coherent, job),
        (_, _, T::RingNonCoherentAsPublished, _) => rings_as_published(mode, C::NonCoherent, job),
        _ => Err(LabError::NotBuilt(mode.name.clone())),
    }
}

fn rings<J: ModeVisitor>(mode: &Mode, coherency: Coherency, job: J) -> Result<J::Output, LabError> {
    use ringfence_dma::ring::Ring;
    let choice = match mode.alloc {
        Alloc::RingTail => SlotChoice::Tail,
        Alloc::RingFree => SlotChoice::NextFree,
        _ => return Err(LabError::NotBuilt(mode.name.clone())),
    };
    Ok(match mode.flush {
        FlushKind::Burst => {
            let recipe = RingParts::new(choice, coherency, Burst::default);
            job.rings::<Ring, FixedLogic, Burst>(recipe)
        }
        FlushKind::PerUnmap => {
            let recipe = RingParts::new(choice, coherency, || Strict);
            job.rings::<Ring, FixedLogic, Strict>(recipe)
        }
        _ => return Err(LabError::NotBuilt(mode.name.clone())),
    })
}

fn rings_as_published<J: ModeVisitor>(
    mode: &Mode,
    coherency: Coherency,
    job: J,
) -> Result<J::Output, LabError> {
    match (mode.alloc, mode.flush) {
        (Alloc::RingTailAsPublished, FlushKind::BurstAsPublished) => {
            let recipe = RingParts::new(SlotChoice::Tail, coherency, || BurstAsPublished);
            Ok(job.rings::<RingAsPublished, LogicAsPublished, BurstAsPublished>(recipe))
        }
        _ => Err(LabError::NotBuilt(mode.name.clone())),
    }
}
