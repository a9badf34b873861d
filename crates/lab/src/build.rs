//! From a mode's row of answers to the types that carry them out: the one dispatch of a replay.
//!
//! Everything behind [`dispatch`] is monomorphised over the answers; in front of it there are only rows.

use std::cell::RefCell;
use std::sync::Arc;

use ringfence_dma::Platform;
use ringfence_dma::flush::{Burst, Deferred, PerCpuQueue, PerWrap, QueueConfig, Ring, Strict};
use ringfence_dma::space::{CachedTable, PlainTable, Reclaiming, Rounding, Translations};
use ringfence_iova::{
    Bitmap, BitmapState, CachedTree, Capacity, Depot, Eiovar, FreeBsdTree, IovaAllocator,
    LinuxRcache, Locked, MagazineLimits, Magazines, RcacheShared,
};
use ringfence_pgtable::{
    Coherency, Levels, MapError, MapRequest, Reclaim, ReclaimingTable, Retired, SecondStage, Table,
    TableError, UnmapError,
};
use ringfence_types::{
    CachedLevels, DomainId, FrameSource, Pfn, PfnRange, PhysAddr, PhysMemory, Unmapped,
};

use crate::any;
use crate::error::LabError;
use crate::meter::FlushFor;
use crate::modes::{Alloc, FlushKind, Mode, TableKind};

/// A table that a replay can make.
pub trait TableMaker: Translations + Sized + 'static {
    /// An empty table.
    fn make<M: PhysMemory, S: FrameSource>(
        domain: DomainId,
        coherency: Coherency,
        memory: &M,
        frames: &S,
    ) -> Result<Self, TableError>;

    /// Where the hardware begins.
    fn root(&self) -> PhysAddr;
}

/// The format of every table of a replay: four levels, as the documents' machine has.
fn format() -> SecondStage {
    SecondStage::new(Levels::Four)
}

impl TableMaker for PlainTable<SecondStage> {
    fn make<M: PhysMemory, S: FrameSource>(
        domain: DomainId,
        coherency: Coherency,
        memory: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        Table::new(format(), domain, coherency, memory, frames).map(Self)
    }

    fn root(&self) -> PhysAddr {
        self.0.root()
    }
}

impl TableMaker for CachedTable<SecondStage> {
    fn make<M: PhysMemory, S: FrameSource>(
        domain: DomainId,
        coherency: Coherency,
        memory: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        Table::new(format(), domain, coherency, memory, frames).map(Self)
    }

    fn root(&self) -> PhysAddr {
        self.0.root()
    }
}

/// How one makes a mode's parts.
pub struct Recipe<A, T, F> {
    /// The allocator of a domain.
    pub alloc: fn(Alloc) -> Result<A, LabError>,
    /// The row's answer to question 1.
    pub answer: Alloc,
    /// The flush policy of the unit.
    pub flush: fn() -> F,
    /// How much is reserved.
    pub rounding: Rounding,
    /// The table is the type.
    pub table: std::marker::PhantomData<fn() -> T>,
}

impl<A, T, F> Clone for Recipe<A, T, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, T, F> Copy for Recipe<A, T, F> {}

/// What is to be done with a mode's types.
pub trait Job {
    /// What comes of it.
    type Output;
    /// For modes without an allocator.
    fn identity(self, table: TableKind) -> Self::Output;
    /// For modes with an allocator and a table.
    fn paged<A, T, F>(self, recipe: Recipe<A, T, F>) -> Self::Output
    where
        A: IovaAllocator + 'static,
        T: TableMaker,
        F: FlushFor<A, T> + 'static;
}

pub(crate) type Single<T> = RefCell<T>;
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

/// A table that gives empty pages back (FreeBSD). `WHOLE` writes back the whole table page at every unmap, as documented; else what was
/// touched, as repaired.
pub struct Reclaimer<const WHOLE: bool>(
    Reclaiming<SecondStage, Single<ReclaimingTable<SecondStage>>>,
);

impl<const WHOLE: bool> TableMaker for Reclaimer<WHOLE> {
    fn make<M: PhysMemory, S: FrameSource>(
        domain: DomainId,
        coherency: Coherency,
        memory: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        let reclaim = if WHOLE {
            Reclaim::FlushPage
        } else {
            Reclaim::FlushTouched
        };
        let table = ReclaimingTable::new(format(), domain, coherency, reclaim, memory, frames)?;
        Ok(Self(Reclaiming::new(table, RefCell::new)))
    }

    fn root(&self) -> PhysAddr {
        self.0.root()
    }
}

impl<const WHOLE: bool> Translations for Reclaimer<WHOLE> {
    type PerCpu = ();
    type Pages = Retired;

    fn per_cpu(&self) {}

    #[inline]
    fn domain(&self) -> DomainId {
        self.0.domain()
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        cpu: &mut (),
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.0.map(cpu, platform, request)
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        cpu: &mut (),
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, Retired), UnmapError> {
        self.0.unmap(cpu, platform, range)
    }

    #[inline]
    fn sync<P: Platform>(&self, cpu: &mut (), platform: &mut P) {
        self.0.sync(cpu, platform);
    }
}

/// All pages of a 48-bit space but page 0, which is never handed out.
fn space(last: u64) -> Result<PfnRange, LabError> {
    PfnRange::inclusive(Pfn::new(1), Pfn::new(last)).ok_or(LabError::Internal("space"))
}

const WHOLE_SPACE: u64 = (1 << 36) - 1;
/// The bitmap of the document covers 4 GiB.
const LOW_SPACE: u64 = (1 << 20) - 1;

pub(crate) fn tree(_: Alloc) -> Result<Tree, LabError> {
    Ok(Locked::new(
        CachedTree::new(space(WHOLE_SPACE)?),
        RefCell::new,
    ))
}

pub(crate) fn freelists(answer: Alloc) -> Result<Freelists, LabError> {
    let capacity = match answer {
        Alloc::Eiovar(Some(k)) => Capacity::AtMost(k),
        _ => Capacity::Unbounded,
    };
    let tree = CachedTree::new(space(WHOLE_SPACE)?);
    Ok(Locked::new(Eiovar::new(tree, capacity), RefCell::new))
}

pub(crate) fn bitmap(_: Alloc) -> Result<Next, LabError> {
    Ok(Bitmap::new(space(LOW_SPACE)?, RefCell::new)?)
}

pub(crate) fn bitmap_literal(_: Alloc) -> Result<Next, LabError> {
    Ok(Bitmap::literal(space(LOW_SPACE)?, RefCell::new)?)
}

pub(crate) fn gas(_: Alloc) -> Result<Gas, LabError> {
    Ok(Locked::new(
        FreeBsdTree::new(space(WHOLE_SPACE)?),
        RefCell::new,
    ))
}

pub(crate) fn rcache(_: Alloc) -> Result<Rcache, LabError> {
    Ok(LinuxRcache::new(
        CachedTree::new(space(WHOLE_SPACE)?),
        RefCell::new,
    ))
}

pub(crate) fn product(_: Alloc) -> Result<Product, LabError> {
    Ok(Magazines::new(
        space(WHOLE_SPACE)?,
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
/// (`any.rs`).
pub fn dispatch<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    use Rounding::{Exact, PowerOfTwo};
    use {Alloc as A, FlushKind as F, TableKind as T};
    fn recipe<A, T, F>(
        mode: &Mode,
        alloc: fn(Alloc) -> Result<A, LabError>,
        flush: fn() -> F,
        rounding: Rounding,
    ) -> Recipe<A, T, F> {
        Recipe {
            alloc,
            answer: mode.alloc,
            flush,
            rounding,
            table: std::marker::PhantomData,
        }
    }
    let strict = || Strict;
    Ok(match (mode.alloc, mode.table, mode.flush) {
        (A::Identity, table, F::Never) => job.identity(table),
        (A::CachedRbTree, T::Radix, F::PerUnmap) => {
            job.paged::<Tree, Plain, Strict>(recipe(mode, tree, strict, PowerOfTwo))
        }
        (A::CachedRbTree, T::Radix, F::Deferred) => {
            job.paged::<Tree, Plain, Queue>(recipe(mode, tree, queue, PowerOfTwo))
        }
        (A::Eiovar(_), T::Radix, F::PerUnmap) => {
            job.paged::<Freelists, Plain, Strict>(recipe(mode, freelists, strict, PowerOfTwo))
        }
        (A::Eiovar(_), T::Radix, F::Deferred) => {
            job.paged::<Freelists, Plain, Queue>(recipe(mode, freelists, queue, PowerOfTwo))
        }
        (A::Bitmap, T::Radix, F::PerWrap) => {
            job.paged::<Next, Plain, PerWrap>(recipe(mode, bitmap, || PerWrap, Exact))
        }
        (A::BitmapLiteral, T::Radix, F::PerWrap) => {
            job.paged::<Next, Plain, PerWrap>(recipe(mode, bitmap_literal, || PerWrap, Exact))
        }
        (A::Bitmap, T::Radix, F::PerUnmap) => {
            job.paged::<Next, Plain, Strict>(recipe(mode, bitmap, strict, Exact))
        }
        (A::FreeBsd, T::RadixReclaimPage, F::PerUnmap) => {
            job.paged::<Gas, Reclaimer<true>, Strict>(recipe(mode, gas, strict, Exact))
        }
        (A::FreeBsd, T::RadixReclaim, F::PerUnmap) => {
            job.paged::<Gas, Reclaimer<false>, Strict>(recipe(mode, gas, strict, Exact))
        }
        (A::LinuxRcache, T::Radix, F::PerUnmap) => {
            job.paged::<Rcache, Plain, Strict>(recipe(mode, rcache, strict, Exact))
        }
        (A::LinuxRcache, T::Radix, F::PerCpuQueue) => {
            job.paged::<Rcache, Plain, Queues>(recipe(mode, rcache, queues, Exact))
        }
        (A::Magazine, T::CachedRadix, F::PerUnmap) => {
            job.paged::<Product, Cached, Strict>(recipe(mode, product, strict, Exact))
        }
        (A::Magazine, T::CachedRadix, F::Burst) => {
            job.paged::<Product, Cached, Burst>(recipe(mode, product, Burst::default, Exact))
        }
        _ => return any::dispatch(mode, job),
    })
}
