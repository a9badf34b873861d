//! The cache of mappings in front of an allocator and a table, for modes whose flush axis requires
//! it (decision 0021).
//!
//! One type serves the caches of all these modes and selects one at run time. This costs one branch
//! per operation.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

pub use ringfence_dma::cache::Cycles;
use ringfence_dma::cache::{
    CacheStats, FlatCache, MappingKey, NotCached, NotInUse, ResidencyPolicy, Retained, Retention,
    ReverseCache,
};
use ringfence_dma::flush::{PerCycle, RangeBatch};
use ringfence_dma::space::{CacheState, CachedSpace, Paged, Rounding, UnknownUnmap};
use ringfence_memory::{Arena, Frames};
use ringfence_papers::rtc::{Rtc, RtcAsPublished};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, Iova, PhysAddr};

use crate::components::{AllocEnv, HostOf, MakeTable, RcacheAlloc, ReplayTable, rcache};
use crate::error::LabError;
use crate::modes::{Alloc, FlushKind, Mode};

/// Maximum number of cached mappings of a device; traces have fewer.
const MAX_CACHED_MAPPINGS: usize = 1 << 20;

/// Quota of `map-cache`: pages in use and released.
const MAP_CACHE_PAGES: usize = 1 << 14;

/// Maximum number of mappings whose teardown `optimistic` delays.
const OPTIMISTIC_MAPPINGS: usize = 256;

/// Maximum number of released buffers in a pool of `premap`: the bound of a ring of page_pool in a
/// patch for Linux of 2025 ("net: page_pool: cap at 16K").
const PAGE_POOL_BUFFERS: usize = 1 << 14;

/// Number of cycles in the bound of the adaptive cache.
const ADAPTIVE_CYCLES: u8 = 250;

/// Reuses per thousand that may miss in the adaptive cache because they come too late.
const ADAPTIVE_LATE_PER_MILLE: u16 = 10;

/// T and C: a cache drops a released mapping at the latest at the (C + 1)th end of a cycle of
/// length T.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CycleParams {
    /// T in nanoseconds, not 0.
    pub cycle_ns: u64,
    /// C: the number of whole cycles.
    pub cycles: Cycles,
}

impl CycleParams {
    /// The values of the PVIOMMU paper: 10 s and 3.
    pub const PAPER: Self = Self {
        cycle_ns: Cycles::PAPER_SECONDS * 1_000_000_000,
        cycles: Cycles::PAPER,
    };

    /// The values of `optimistic`: a teardown waits for 3 to 4 ms ("a few milliseconds", EIOVAR
    /// section 8).
    pub const OPTIMISTIC: Self = Self {
        cycle_ns: 1_000_000,
        cycles: Cycles::PAPER,
    };

    /// Cycles of caches without a residency. They order released mappings by age.
    const UNTIMED: Self = Self {
        cycle_ns: 10_000_000,
        cycles: Cycles::PAPER,
    };

    /// Returns the bound T x (C + 1), in nanoseconds.
    pub fn bound_ns(&self) -> u64 {
        self.cycle_ns
            .saturating_mul(u64::from(self.cycles.get()) + 1)
    }

    /// Returns the same bound with the shortest cycles that a cache can count.
    fn with_shortest_cycles(&self) -> Self {
        Self {
            cycle_ns: (self.bound_ns() / u64::from(ADAPTIVE_CYCLES)).max(1),
            cycles: Cycles::new(ADAPTIVE_CYCLES - 1).unwrap_or(self.cycles),
        }
    }

    /// Returns the parameters that apply to `mode`; `None` unless it has a cache that keeps
    /// released mappings for some cycles.
    pub fn for_mode(&self, mode: &Mode) -> Option<Self> {
        self.for_flush(mode.flush)
    }

    fn for_flush(&self, flush: FlushKind) -> Option<Self> {
        match flush {
            FlushKind::PerCycle | FlushKind::PerCycleAsPublished => Some(*self),
            FlushKind::PerCycleAdaptive => Some(self.with_shortest_cycles()),
            FlushKind::Optimistic => Some(Self::OPTIMISTIC),
            _ => None,
        }
    }
}

impl Default for CycleParams {
    fn default() -> Self {
        Self::PAPER
    }
}

impl fmt::Display for CycleParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let (cycle, count) = (seconds(self.cycle_ns), u64::from(self.cycles.get()) + 1);
        write!(f, "{} s: {cycle} s x {count}", seconds(self.bound_ns()))
    }
}

/// A reverse translation cache of any kind.
#[derive(Debug)]
pub enum DynCache {
    /// The PVIOMMU paper's tree, fixed.
    Tree(Box<Rtc>),
    /// Ringfence's table, with any retention.
    Flat(Box<FlatCache>),
    /// The PVIOMMU paper's cache, as published.
    AsPublished(Box<RtcAsPublished>),
}

impl ReverseCache for DynCache {
    #[inline]
    fn acquire(&mut self, key: MappingKey) -> Option<Iova> {
        match self {
            Self::Tree(cache) => cache.acquire(key),
            Self::Flat(cache) => cache.acquire(key),
            Self::AsPublished(cache) => cache.acquire(key),
        }
    }

    fn insert(&mut self, key: MappingKey, giova: Iova) -> Result<(), NotCached> {
        match self {
            Self::Tree(cache) => cache.insert(key, giova),
            Self::Flat(cache) => cache.insert(key, giova),
            Self::AsPublished(cache) => cache.insert(key, giova),
        }
    }

    #[inline]
    fn release(&mut self, key: MappingKey) -> Result<Retained, NotInUse> {
        match self {
            Self::Tree(cache) => cache.release(key),
            Self::Flat(cache) => cache.release(key),
            Self::AsPublished(cache) => cache.release(key),
        }
    }

    fn tick(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        match self {
            Self::Tree(cache) => cache.tick(expired),
            Self::Flat(cache) => cache.tick(expired),
            Self::AsPublished(cache) => cache.tick(expired),
        }
    }

    fn evict(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        match self {
            Self::Tree(cache) => cache.evict(expired),
            Self::Flat(cache) => cache.evict(expired),
            Self::AsPublished(cache) => cache.evict(expired),
        }
    }

    fn drain(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        match self {
            Self::Tree(cache) => cache.drain(expired),
            Self::Flat(cache) => cache.drain(expired),
            Self::AsPublished(cache) => cache.drain(expired),
        }
    }

    fn stats(&self) -> CacheStats {
        match self {
            Self::Tree(cache) => cache.stats(),
            Self::Flat(cache) => cache.stats(),
            Self::AsPublished(cache) => cache.stats(),
        }
    }
}

/// An address space behind a cache, with any allocator and table: those of a mode, or the meter's
/// stubs.
pub type DynCachedSpace<T, A = RcacheAlloc> =
    CachedSpace<A, T, DynCache, RefCell<CacheState<DynCache>>>;

/// The flush policy of modes with a cache.
pub type CycleFlush = PerCycle<RefCell<RangeBatch>>;

/// The constructors of a mode with a cache. `T` is the table behind the cache.
pub struct CachedParts<T: ReplayTable> {
    flush: FlushKind,
    /// Creates the table of a domain.
    pub(crate) table: MakeTable<T>,
}

impl<T: ReplayTable> Clone for CachedParts<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ReplayTable> Copy for CachedParts<T> {}

impl<T: ReplayTable> CachedParts<T> {
    /// Returns the constructors of `mode`, which has a cache and this table.
    pub(crate) fn new(mode: &Mode, table: MakeTable<T>) -> Self {
        Self {
            flush: mode.flush,
            table: T::with_page_size(table, mode.page_size),
        }
    }

    /// Returns true if the driver's pool keeps the pages of released buffers.
    pub fn recycles(self) -> bool {
        self.flush == FlushKind::PagePool
    }

    /// Creates the flush policy.
    pub fn flush() -> CycleFlush {
        PerCycle::new(RefCell::new)
    }

    /// Returns the parameters that apply to this cache; `None` if no number of cycles bounds its
    /// residency.
    pub fn cycling(self, cycling: CycleParams) -> Option<CycleParams> {
        cycling.for_flush(self.flush)
    }

    /// Puts a cache in front of an allocator and a table.
    pub fn with_cache<A, U>(
        self,
        paged: Paged<A, U>,
        cycling: CycleParams,
    ) -> DynCachedSpace<U, A> {
        let params = self.cycling(cycling).unwrap_or(CycleParams::UNTIMED);
        let cycles = params.cycles;
        let flat = |limit, retention: Retention| {
            DynCache::Flat(Box::new(FlatCache::new(cycles, limit, retention)))
        };
        let mut unknown = UnknownUnmap::Refused;
        let cache = match self.flush {
            FlushKind::PerCycleAsPublished => {
                unknown = UnknownUnmap::Ignored;
                let cache = RtcAsPublished::new(cycles, MAX_CACHED_MAPPINGS);
                DynCache::AsPublished(Box::new(cache))
            }
            FlushKind::PerCycleAdaptive => {
                let late = ADAPTIVE_LATE_PER_MILLE;
                flat(
                    MAX_CACHED_MAPPINGS,
                    ResidencyPolicy::Adaptive { late }.into(),
                )
            }
            FlushKind::LastUser => flat(MAX_CACHED_MAPPINGS, Retention::NONE),
            FlushKind::Optimistic => {
                let retention = Retention {
                    residency: ResidencyPolicy::Fixed,
                    released_max: OPTIMISTIC_MAPPINGS,
                };
                flat(MAX_CACHED_MAPPINGS, retention)
            }
            FlushKind::MapCache => flat(MAP_CACHE_PAGES, ResidencyPolicy::UntilFull.into()),
            FlushKind::PagePool => {
                let retention = Retention {
                    residency: ResidencyPolicy::UntilFull,
                    released_max: PAGE_POOL_BUFFERS,
                };
                flat(MAX_CACHED_MAPPINGS, retention)
            }
            FlushKind::NeverFree => flat(MAX_CACHED_MAPPINGS, ResidencyPolicy::UntilFull.into()),
            _ => DynCache::Tree(Box::new(Rtc::new(cycles, MAX_CACHED_MAPPINGS))),
        };
        CachedSpace::new(paged, cache, params.cycle_ns, unknown, RefCell::new)
    }

    /// Creates the space of a domain. Returns it with the root of the table that the hardware
    /// walks.
    ///
    /// # Errors
    /// Memory is short.
    pub fn space(
        self,
        domain: DomainId,
        coherency: Coherency,
        cycling: CycleParams,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        host: Option<&HostOf<T>>,
    ) -> Result<(DynCachedSpace<T>, PhysAddr), LabError> {
        let table = (self.table)(domain, coherency, memory, frames, host)?;
        let root = table.root();
        let alloc = Self::allocator(memory, frames, Some(root))?;
        let paged = Paged::new(alloc, table, Rounding::Exact);
        Ok((self.with_cache(paged, cycling), root))
    }

    /// Creates the allocator behind a cache.
    ///
    /// # Errors
    /// Memory is short.
    pub(crate) fn allocator(
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        table: Option<PhysAddr>,
    ) -> Result<RcacheAlloc, LabError> {
        rcache(&AllocEnv {
            kind: Alloc::LinuxRcache,
            memory,
            frames,
            table,
            last_page: T::LAST_PAGE,
        })
    }
}
