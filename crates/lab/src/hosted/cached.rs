//! The reverse translation cache in front of a para-virtual IOMMU, as a mode's answer to question 3 asks for it (decision 0021).
//!
//! There is one type for all of these modes: which cache it is, is decided at run time. What that costs is a branch an operation.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use ringfence_dma::flush::{PerCycle, RangeBatch};
use ringfence_dma::space::{Paged, Rounding};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_pviommu::frontend::{Caching, Reverse, Strays};
use ringfence_pviommu::rtc::{
    Cache, Cycles, FlatRtc, Key, LiteralRtc, NotCached, NotHeld, Residency, Rtc, Stats,
};
use ringfence_types::{DomainId, Iova, PhysAddr};

use super::{PviommuHost, PviommuTable, Shared, pviommu};
use crate::build::{Job, MakeTable, Rcache, ReplayTable, Site, rcache};
use crate::error::LabError;
use crate::modes::{Alloc, FlushKind, Mode, TableKind};

/// Mappings of a device that are cached at most; a trace has fewer.
const LIMIT: usize = 1 << 20;

/// Cycles of the adaptive cache within the bound of the others.
const FINE: u8 = 250;

/// Reuses in a thousand that may come too late for the adaptive cache.
const LATE: u16 = 10;

/// T and C: a released mapping leaves with the (C + 1)th end of a cycle of T, or before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cycling {
    /// T in nanoseconds, not 0.
    pub cycle_ns: u64,
    /// C.
    pub cycles: Cycles,
}

impl Cycling {
    /// The document's: 10 s and 3.
    pub const DOCUMENT: Self = Self {
        cycle_ns: Cycles::DOCUMENT_SECONDS * 1_000_000_000,
        cycles: Cycles::DOCUMENT,
    };

    /// T x (C + 1), in nanoseconds.
    pub fn bound_ns(&self) -> u64 {
        self.cycle_ns
            .saturating_mul(u64::from(self.cycles.get()) + 1)
    }

    /// The same bound in the shortest cycles that a cache can count.
    fn fine(&self) -> Self {
        Self {
            cycle_ns: (self.bound_ns() / u64::from(FINE)).max(1),
            cycles: Cycles::new(FINE - 1).unwrap_or(self.cycles),
        }
    }

    /// What `mode` has of it; `None` without a cache.
    pub fn of(&self, mode: &Mode) -> Option<Self> {
        self.under(mode.flush)
    }

    fn under(&self, flush: FlushKind) -> Option<Self> {
        match flush {
            FlushKind::PerCycle | FlushKind::PerCycleLiteral => Some(*self),
            FlushKind::PerCycleAdaptive => Some(self.fine()),
            _ => None,
        }
    }
}

impl Default for Cycling {
    fn default() -> Self {
        Self::DOCUMENT
    }
}

impl fmt::Display for Cycling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let (cycle, count) = (seconds(self.cycle_ns), u64::from(self.cycles.get()) + 1);
        write!(f, "{} s: {cycle} s x {count}", seconds(self.bound_ns()))
    }
}

/// One of the caches.
#[derive(Debug)]
pub enum AnyCache {
    /// The document's tree, repaired.
    Tree(Box<Rtc>),
    /// Ringfence's table, whose residency follows reuse.
    Adaptive(Box<FlatRtc>),
    /// As printed.
    Literal(Box<LiteralRtc>),
}

impl Cache for AnyCache {
    #[inline]
    fn take(&mut self, key: Key) -> Option<Iova> {
        match self {
            Self::Tree(cache) => cache.take(key),
            Self::Adaptive(cache) => cache.take(key),
            Self::Literal(cache) => cache.take(key),
        }
    }

    fn insert(&mut self, key: Key, giova: Iova) -> Result<(), NotCached> {
        match self {
            Self::Tree(cache) => cache.insert(key, giova),
            Self::Adaptive(cache) => cache.insert(key, giova),
            Self::Literal(cache) => cache.insert(key, giova),
        }
    }

    #[inline]
    fn release(&mut self, key: Key) -> Result<(), NotHeld> {
        match self {
            Self::Tree(cache) => cache.release(key),
            Self::Adaptive(cache) => cache.release(key),
            Self::Literal(cache) => cache.release(key),
        }
    }

    fn tick(&mut self, expired: impl FnMut(Key, Iova)) {
        match self {
            Self::Tree(cache) => cache.tick(expired),
            Self::Adaptive(cache) => cache.tick(expired),
            Self::Literal(cache) => cache.tick(expired),
        }
    }

    fn shed(&mut self, expired: impl FnMut(Key, Iova)) {
        match self {
            Self::Tree(cache) => cache.shed(expired),
            Self::Adaptive(cache) => cache.shed(expired),
            Self::Literal(cache) => cache.shed(expired),
        }
    }

    fn drain(&mut self, expired: impl FnMut(Key, Iova)) {
        match self {
            Self::Tree(cache) => cache.drain(expired),
            Self::Adaptive(cache) => cache.drain(expired),
            Self::Literal(cache) => cache.drain(expired),
        }
    }

    fn stats(&self) -> Stats {
        match self {
            Self::Tree(cache) => cache.stats(),
            Self::Adaptive(cache) => cache.stats(),
            Self::Literal(cache) => cache.stats(),
        }
    }
}

/// An address space behind a cache, with any allocator and table: those of a mode, or the meter's stubs.
pub type CachedSpace<A = Rcache, T = PviommuTable> =
    Caching<A, T, AnyCache, RefCell<Reverse<AnyCache>>>;

/// The flush policy of modes with a cache.
pub type CycleFlush = PerCycle<RefCell<RangeBatch>>;

/// How one makes the parts of a mode with a cache.
#[derive(Debug, Clone, Copy)]
pub struct CachedRecipe {
    flush: FlushKind,
    /// The table of a domain.
    pub(crate) table: MakeTable<PviommuTable>,
}

impl CachedRecipe {
    /// The policy.
    pub fn flush() -> CycleFlush {
        PerCycle::new(RefCell::new)
    }

    /// What the cache has of T and C.
    pub fn cycling(self, cycling: Cycling) -> Option<Cycling> {
        cycling.under(self.flush)
    }

    /// Puts a cache in front of an allocator and a table.
    pub fn in_front<A, T>(self, paged: Paged<A, T>, cycling: Cycling) -> CachedSpace<A, T> {
        let Cycling { cycles, .. } = cycling;
        let (cache, cycle_ns, strays) = match self.flush {
            FlushKind::PerCycleLiteral => {
                let cache = AnyCache::Literal(Box::new(LiteralRtc::new(cycles, LIMIT)));
                (cache, cycling.cycle_ns, Strays::Ignored)
            }
            FlushKind::PerCycleAdaptive => {
                let Cycling { cycle_ns, cycles } = cycling.fine();
                let residency = Residency::Adaptive { late: LATE };
                let cache = FlatRtc::new(cycles, LIMIT, residency);
                (
                    AnyCache::Adaptive(Box::new(cache)),
                    cycle_ns,
                    Strays::Refused,
                )
            }
            _ => {
                let cache = AnyCache::Tree(Box::new(Rtc::new(cycles, LIMIT)));
                (cache, cycling.cycle_ns, Strays::Refused)
            }
        };
        Caching::new(paged, cache, cycle_ns, strays, RefCell::new)
    }

    /// The space of a domain, and where the hardware's walks begin.
    ///
    /// # Errors
    /// No room.
    pub fn space(
        self,
        domain: DomainId,
        cycling: Cycling,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        host: Option<&Shared<PviommuHost>>,
    ) -> Result<(CachedSpace, PhysAddr), LabError> {
        let table = (self.table)(domain, Coherency::Coherent, memory, frames, host)?;
        let root = table.root();
        let alloc = allocator(memory, frames, Some(root))?;
        let paged = Paged::new(alloc, table, Rounding::Exact);
        Ok((self.in_front(paged, cycling), root))
    }
}

/// The allocator behind a cache.
///
/// # Errors
/// No room.
pub(crate) fn allocator(
    memory: &Rc<Arena>,
    frames: &Frames<Rc<Arena>>,
    table: Option<PhysAddr>,
) -> Result<Rcache, LabError> {
    rcache(&Site {
        answer: Alloc::LinuxRcache,
        memory,
        frames,
        table,
        last_page: PviommuTable::LAST_PAGE,
    })
}

/// Calls the job with the parts of `mode`, if it has a cache.
///
/// # Errors
/// A row that nothing here carries out.
pub(crate) fn dispatch<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    match (mode.alloc, mode.table, mode.flush) {
        (
            Alloc::LinuxRcache,
            TableKind::Radix,
            flush
            @ (FlushKind::PerCycle | FlushKind::PerCycleAdaptive | FlushKind::PerCycleLiteral),
        ) => Ok(job.cached(CachedRecipe {
            flush,
            table: pviommu(mode.who),
        })),
        _ => Err(LabError::NotBuilt(mode.name.clone())),
    }
}
