//! From a mode's row of answers to the types that carry them out: the one dispatch of a replay.
//!
//! Everything behind [`dispatch`] is monomorphised over the answers; in front of it there are only rows. What is timed goes there. What is
//! judged goes through [`dispatch_by_parts`], where many modes have their types in common.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ringfence_dma::flush::{
    Burst, Deferred, LiteralBurst, PerCpuQueue, PerWrap, QueueConfig, Ring, Strict,
};
use ringfence_dma::ring::{LiteralRing, SlotChoice};
use ringfence_dma::space::{CachedTable, PlainTable, Reclaiming, Rounding, Translations};
use ringfence_hw::{Literal, Repaired, RingLogic};
use ringfence_iova::{
    Bitmap, BitmapState, CachedTree, Capacity, Depot, Eiovar, FreeBsdTree, LinuxRcache, Locked,
    MagazineLimits, Magazines, RcacheShared, TableBitmap, TableCursor,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    CalgaryTce, Coherency, Levels, Reclaim, ReclaimingTable, SecondStage, Table, TableError,
};
use ringfence_types::{DomainId, PageSize, Pfn, PfnRange, PhysAddr};

use crate::any;
use crate::error::LabError;
use crate::hardware::{Calgary, Hardware, Vtd};
use crate::hosted::{self, CachedRecipe, PviommuTable, VirtioTable, pviommu};
use crate::meter::{FlushFor, FlushForRings, ReplayAlloc, ReplayRing, Stubbed};
use crate::modes::{Alloc, FlushKind, Mode, TableKind, Who};
use crate::ring::RingRecipe;

/// A table that a replay can have.
pub trait ReplayTable: Translations + Sized + 'static {
    /// The hardware that looks it up.
    type Hardware: Hardware;

    /// The highest page that it translates.
    const LAST_PAGE: u64 = WHOLE_SPACE;

    /// Where the hardware begins.
    fn root(&self) -> PhysAddr;
}

/// Who keeps a table.
pub type HostOf<T> = <<T as ReplayTable>::Hardware as Hardware>::Host;

/// Makes the empty table of a domain, which a host keeps if there is one; fails for want of room.
pub type MakeTable<T> =
    fn(DomainId, Coherency, &Arena, &Frames<Rc<Arena>>, Option<&HostOf<T>>) -> Result<T, LabError>;

/// Makes the allocator of a domain; fails for want of room.
pub type MakeAlloc<A> = fn(&Site<'_>) -> Result<A, LabError>;

/// The format of every radix table of a replay: four levels, as the documents' machine has.
fn format() -> SecondStage {
    SecondStage::new(Levels::Four)
}

impl ReplayTable for Plain {
    type Hardware = Vtd;

    fn root(&self) -> PhysAddr {
        self.0.root()
    }
}

impl ReplayTable for Cached {
    type Hardware = Vtd;

    fn root(&self) -> PhysAddr {
        self.0.root()
    }
}

impl ReplayTable for Flat {
    type Hardware = Calgary;
    const LAST_PAGE: u64 = LOW_SPACE;

    fn root(&self) -> PhysAddr {
        self.0.root()
    }
}

impl ReplayTable for Reclaimer {
    type Hardware = Vtd;

    fn root(&self) -> PhysAddr {
        Reclaiming::root(self)
    }
}

/// A radix table that keeps its pages.
fn radix(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
) -> Result<Table<SecondStage>, LabError> {
    Ok(Table::new(format(), domain, coherency, memory, frames)?)
}

pub(crate) fn plain(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<Plain, LabError> {
    radix(domain, coherency, memory, frames).map(PlainTable)
}

pub(crate) fn cached(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<Cached, LabError> {
    radix(domain, coherency, memory, frames).map(CachedTable)
}

pub(crate) fn flat(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<Flat, LabError> {
    let root = flat_root(frames).ok_or(TableError::OutOfFrames)?;
    let table = Table::at(CalgaryTce::FULL, domain, coherency, memory, root)?;
    Ok(PlainTable(table))
}

/// Writes back the whole table page at every unmap, as documented.
pub(crate) fn reclaimer_of_pages(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<Reclaimer, LabError> {
    let reclaim = Reclaim::FlushPage;
    let table = ReclaimingTable::new(format(), domain, coherency, reclaim, memory, frames)?;
    Ok(Reclaiming::new(table, RefCell::new))
}

/// Writes back what was touched, as repaired.
pub(crate) fn reclaimer(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<Reclaimer, LabError> {
    let reclaim = Reclaim::FlushTouched;
    let table = ReclaimingTable::new(format(), domain, coherency, reclaim, memory, frames)?;
    Ok(Reclaiming::new(table, RefCell::new))
}

/// Kept by a host behind a virtio-iommu.
pub(crate) fn virtio(
    domain: DomainId,
    _: Coherency,
    _: &Arena,
    _: &Frames<Rc<Arena>>,
    host: Option<&HostOf<VirtioTable>>,
) -> Result<VirtioTable, LabError> {
    let host = host.ok_or(LabError::Internal("a guest without a host"))?;
    VirtioTable::new(host, domain)
}

/// Room for the one level of a flat table.
fn flat_root(frames: &Frames<Rc<Arena>>) -> Option<PhysAddr> {
    let bytes = Table::root_bytes_of(&CalgaryTce::FULL);
    let count = bytes.div_ceil(PageSize::Size4K.bytes());
    frames.alloc_contiguous(count).ok()
}

/// Where the allocator of a domain comes to stand.
pub struct Site<'a> {
    /// The row's answer to question 1.
    pub answer: Alloc,
    /// Memory.
    pub memory: &'a Rc<Arena>,
    /// Frames in it.
    pub frames: &'a Frames<Rc<Arena>>,
    /// The root of the domain's table; none where the meter has taken the table away.
    pub table: Option<PhysAddr>,
    /// The highest page that the table translates.
    pub last_page: u64,
}

/// How one makes a mode's parts.
pub struct Recipe<A, T: ReplayTable, F> {
    /// The allocator of a domain.
    pub alloc: MakeAlloc<A>,
    /// The row's answer to question 1.
    pub answer: Alloc,
    /// The flush policy of the unit.
    pub flush: fn() -> F,
    /// How much is reserved.
    pub rounding: Rounding,
    /// The table of a domain.
    pub table: MakeTable<T>,
}

impl<A, T: ReplayTable, F> Clone for Recipe<A, T, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, T: ReplayTable, F> Copy for Recipe<A, T, F> {}

impl<A, T: ReplayTable, F> Recipe<A, T, F> {
    /// The allocator of a domain with `table`, which is as it was made; without one, as if there were.
    ///
    /// # Errors
    /// No room.
    pub fn allocator(
        &self,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        table: Option<&T>,
    ) -> Result<A, LabError> {
        (self.alloc)(&Site {
            answer: self.answer,
            memory,
            frames,
            table: table.map(T::root),
            last_page: T::LAST_PAGE,
        })
    }
}

/// What is to be done with a mode's types.
pub trait Job {
    /// What comes of it.
    type Output;
    /// For modes without an allocator.
    fn identity(self, table: TableKind) -> Self::Output;
    /// For modes with an allocator and a table.
    fn paged<A, T, F>(self, recipe: Recipe<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static;
    /// For modes with a reverse translation cache.
    fn cached(self, recipe: CachedRecipe) -> Self::Output;
    /// For modes whose tables are rings.
    fn rings<D, L, F>(self, recipe: RingRecipe<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static;
}

/// A cell for what the processors of a replay, which is one thread, share.
pub type Single<T> = RefCell<T>;
pub(crate) type Tree = Locked<CachedTree, Single<CachedTree>>;
pub(crate) type Freelists = Locked<Eiovar<CachedTree>, Single<Eiovar<CachedTree>>>;
pub(crate) type Next = Bitmap<Single<BitmapState>>;
pub(crate) type Gas = Locked<FreeBsdTree, Single<FreeBsdTree>>;
pub(crate) type Rcache = LinuxRcache<CachedTree, Single<RcacheShared<CachedTree>>>;
pub(crate) type Product = Magazines<Single<Depot>>;
pub(crate) type Queue = Deferred<Single<ringfence_dma::flush::DeferredQueue>>;
pub(crate) type Queues = PerCpuQueue<Single<Ring>, Single<Vec<Arc<Single<Ring>>>>>;
pub(crate) type Plain = PlainTable<SecondStage>;
pub(crate) type Cached = CachedTable<SecondStage>;
pub(crate) type Flat = PlainTable<CalgaryTce>;
pub(crate) type TableBits = TableBitmap<Rc<Arena>, Single<TableCursor>>;

/// A table that gives empty pages back (FreeBSD).
pub(crate) type Reclaimer = Reclaiming<SecondStage, Single<ReclaimingTable<SecondStage>>>;

impl Stubbed for Tree {}
impl Stubbed for Freelists {}
impl Stubbed for Next {}
impl Stubbed for Gas {}
impl Stubbed for Rcache {}
impl Stubbed for Product {}

const WHOLE_SPACE: u64 = (1 << 36) - 1;
/// The bitmap of the document covers 4 GiB, and so does a flat table.
const LOW_SPACE: u64 = (1 << 20) - 1;

impl Site<'_> {
    /// All pages that the table translates but page 0, which is never handed out.
    fn space(&self) -> Result<PfnRange, LabError> {
        self.low_space(u64::MAX)
    }

    /// The same up to `last`.
    fn low_space(&self, last: u64) -> Result<PfnRange, LabError> {
        PfnRange::inclusive(Pfn::new(1), Pfn::new(last.min(self.last_page)))
            .ok_or(LabError::Internal("space"))
    }
}

pub(crate) fn tree(site: &Site<'_>) -> Result<Tree, LabError> {
    Ok(Locked::new(CachedTree::new(site.space()?), RefCell::new))
}

pub(crate) fn freelists(site: &Site<'_>) -> Result<Freelists, LabError> {
    let capacity = match site.answer {
        Alloc::Eiovar(Some(k)) => Capacity::AtMost(k),
        _ => Capacity::Unbounded,
    };
    let tree = CachedTree::new(site.space()?);
    Ok(Locked::new(Eiovar::new(tree, capacity), RefCell::new))
}

pub(crate) fn bitmap(site: &Site<'_>) -> Result<Next, LabError> {
    Ok(Bitmap::new(site.low_space(LOW_SPACE)?, RefCell::new)?)
}

pub(crate) fn bitmap_literal(site: &Site<'_>) -> Result<Next, LabError> {
    Ok(Bitmap::literal(site.low_space(LOW_SPACE)?, RefCell::new)?)
}

/// The entries that the hardware reads are the bitmap; without a table, entries that nobody reads.
pub(crate) fn table_bitmap(site: &Site<'_>) -> Result<TableBits, LabError> {
    let table = site.table.or_else(|| flat_root(site.frames));
    let table = table.ok_or(TableError::OutOfFrames)?;
    let made = TableBitmap::new(
        Rc::clone(site.memory),
        table,
        site.low_space(LOW_SPACE)?,
        RefCell::new,
    );
    made.map_err(|_| LabError::Table(TableError::Memory))
}

pub(crate) fn gas(site: &Site<'_>) -> Result<Gas, LabError> {
    Ok(Locked::new(FreeBsdTree::new(site.space()?), RefCell::new))
}

pub(crate) fn rcache(site: &Site<'_>) -> Result<Rcache, LabError> {
    Ok(LinuxRcache::new(
        CachedTree::new(site.space()?),
        RefCell::new,
    ))
}

pub(crate) fn product(site: &Site<'_>) -> Result<Product, LabError> {
    Ok(Magazines::new(
        site.space()?,
        MagazineLimits::DEFAULT,
        RefCell::new,
    )?)
}

pub(crate) fn queue() -> Queue {
    Deferred::new(RefCell::new)
}

pub(crate) fn queues() -> Queues {
    PerCpuQueue::new(QueueConfig::default(), RefCell::new, RefCell::new)
}

/// Calls the job with the types of `mode`. Rows without a name are put together from parts that dispatch at each operation
/// (`any/`).
///
/// # Errors
/// The mode is not built in.
pub fn dispatch<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    named(mode, job).or_else(|job| dispatch_by_parts(mode, job))
}

/// The same for modes that have a name, an allocator and a table: only these have types of their own.
///
/// # Errors
/// The mode is none of them: the job comes back.
pub(crate) fn named<J: Job>(mode: &Mode, job: J) -> Result<J::Output, J> {
    use Rounding::{Exact, PowerOfTwo};
    use {Alloc as A, FlushKind as F, TableKind as T, Who as W};
    fn recipe<A, T: ReplayTable, F>(
        mode: &Mode,
        alloc: MakeAlloc<A>,
        table: MakeTable<T>,
        flush: fn() -> F,
        rounding: Rounding,
    ) -> Recipe<A, T, F> {
        Recipe {
            alloc,
            answer: mode.alloc,
            flush,
            rounding,
            table,
        }
    }
    let strict = || Strict;
    let kernel = match mode.who {
        W::Kernel | W::Host => (mode.alloc, mode.table, mode.flush),
        W::VirtioIommu => {
            return Ok(match (mode.alloc, mode.table, mode.flush) {
                (A::LinuxRcache, T::Radix, F::PerUnmap) => job
                    .paged::<Rcache, VirtioTable, Strict>(recipe(
                        mode, rcache, virtio, strict, Exact,
                    )),
                (A::LinuxRcache, T::Radix, F::PerCpuQueue) => job
                    .paged::<Rcache, VirtioTable, Queues>(recipe(
                        mode, rcache, virtio, queues, Exact,
                    )),
                _ => return Err(job),
            });
        }
        W::Pviommu | W::PviommuHopt => {
            let table = pviommu(mode.who);
            return Ok(match (mode.alloc, mode.table, mode.flush) {
                (A::LinuxRcache, T::Radix, F::PerUnmap) => job
                    .paged::<Rcache, PviommuTable, Strict>(recipe(
                        mode, rcache, table, strict, Exact,
                    )),
                _ => return Err(job),
            });
        }
    };
    Ok(match kernel {
        (A::CachedRbTree, T::Radix, F::PerUnmap) => {
            job.paged::<Tree, Plain, Strict>(recipe(mode, tree, plain, strict, PowerOfTwo))
        }
        (A::CachedRbTree, T::Radix, F::Deferred) => {
            job.paged::<Tree, Plain, Queue>(recipe(mode, tree, plain, queue, PowerOfTwo))
        }
        (A::Eiovar(_), T::Radix, F::PerUnmap) => job
            .paged::<Freelists, Plain, Strict>(recipe(mode, freelists, plain, strict, PowerOfTwo)),
        (A::Eiovar(_), T::Radix, F::Deferred) => {
            job.paged::<Freelists, Plain, Queue>(recipe(mode, freelists, plain, queue, PowerOfTwo))
        }
        (A::Bitmap, T::Radix, F::PerWrap) => {
            job.paged::<Next, Plain, PerWrap>(recipe(mode, bitmap, plain, || PerWrap, Exact))
        }
        (A::BitmapLiteral, T::Radix, F::PerWrap) => job.paged::<Next, Plain, PerWrap>(recipe(
            mode,
            bitmap_literal,
            plain,
            || PerWrap,
            Exact,
        )),
        (A::Bitmap, T::Radix, F::PerUnmap) => {
            job.paged::<Next, Plain, Strict>(recipe(mode, bitmap, plain, strict, Exact))
        }
        (A::FreeBsd, T::RadixReclaimPage, F::PerUnmap) => job
            .paged::<Gas, Reclaimer, Strict>(recipe(mode, gas, reclaimer_of_pages, strict, Exact)),
        (A::FreeBsd, T::RadixReclaim, F::PerUnmap) => {
            job.paged::<Gas, Reclaimer, Strict>(recipe(mode, gas, reclaimer, strict, Exact))
        }
        (A::LinuxRcache, T::Radix, F::PerUnmap) => {
            job.paged::<Rcache, Plain, Strict>(recipe(mode, rcache, plain, strict, Exact))
        }
        (A::LinuxRcache, T::Radix, F::PerCpuQueue) => {
            job.paged::<Rcache, Plain, Queues>(recipe(mode, rcache, plain, queues, Exact))
        }
        (A::Magazine, T::CachedRadix, F::PerUnmap) => {
            job.paged::<Product, Cached, Strict>(recipe(mode, product, cached, strict, Exact))
        }
        (A::Magazine, T::CachedRadix, F::Burst) => job.paged::<Product, Cached, Burst>(recipe(
            mode,
            product,
            cached,
            Burst::default,
            Exact,
        )),
        _ => return Err(job),
    })
}

/// Calls the job with parts that dispatch at each operation, whether the mode has a name or not: for whoever judges and counts, and whom
/// it serves to be compiled for few types. What is one object, as a ring or a cache, has no other parts.
///
/// # Errors
/// The mode is not built in.
pub fn dispatch_by_parts<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    if is_whole(mode) {
        whole(mode, job)
    } else {
        any::dispatch(mode, job)
    }
}

/// Whether one object carries out several of a mode's answers: identity, rings, a reverse translation cache.
pub(crate) fn is_whole(mode: &Mode) -> bool {
    let cached = matches!(
        mode.flush,
        FlushKind::PerCycle | FlushKind::PerCycleAdaptive | FlushKind::PerCycleLiteral
    );
    mode.alloc == Alloc::Identity || mode.has_rings() || cached
}

/// Calls the job with the types of a mode that [is whole](is_whole).
///
/// # Errors
/// The mode is not built in.
pub(crate) fn whole<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    use {Coherency as C, TableKind as T};
    match (mode.who, mode.alloc, mode.table, mode.flush) {
        (Who::Pviommu | Who::PviommuHopt, ..) => hosted::dispatch(mode, job),
        (Who::VirtioIommu, ..) => Err(LabError::NotBuilt(mode.name.clone())),
        (_, Alloc::Identity, table, FlushKind::Never) => Ok(job.identity(table)),
        (_, _, T::Ring, _) => rings(mode, C::Coherent, job),
        (_, _, T::RingNonCoherent, _) => rings(mode, C::NonCoherent, job),
        (_, _, T::RingLiteral, _) => literal_rings(mode, C::Coherent, job),
        (_, _, T::RingNonCoherentLiteral, _) => literal_rings(mode, C::NonCoherent, job),
        _ => Err(LabError::NotBuilt(mode.name.clone())),
    }
}

fn rings<J: Job>(mode: &Mode, coherency: Coherency, job: J) -> Result<J::Output, LabError> {
    use ringfence_dma::ring::Ring;
    let choice = match mode.alloc {
        Alloc::RingTail => SlotChoice::Tail,
        Alloc::RingFree => SlotChoice::NextFree,
        _ => return Err(LabError::NotBuilt(mode.name.clone())),
    };
    Ok(match mode.flush {
        FlushKind::Burst => {
            let recipe = RingRecipe::new(choice, coherency, Burst::default);
            job.rings::<Ring, Repaired, Burst>(recipe)
        }
        FlushKind::PerUnmap => {
            let recipe = RingRecipe::new(choice, coherency, || Strict);
            job.rings::<Ring, Repaired, Strict>(recipe)
        }
        _ => return Err(LabError::NotBuilt(mode.name.clone())),
    })
}

fn literal_rings<J: Job>(mode: &Mode, coherency: Coherency, job: J) -> Result<J::Output, LabError> {
    match (mode.alloc, mode.flush) {
        (Alloc::RingTailLiteral, FlushKind::BurstLiteral) => {
            let recipe = RingRecipe::new(SlotChoice::Tail, coherency, || LiteralBurst);
            Ok(job.rings::<LiteralRing, Literal, LiteralBurst>(recipe))
        }
        _ => Err(LabError::NotBuilt(mode.name.clone())),
    }
}
