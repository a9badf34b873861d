//! The reverse translation cache in front of a para-virtual IOMMU, for modes whose flush axis
//! requires it (decision 0021).
//!
//! One type serves all of these modes and selects the cache at run time. This costs one branch per
//! operation.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use ringfence_dma::flush::{PerCycle, RangeBatch};
use ringfence_dma::space::{Paged, Rounding};
use ringfence_memory::{Arena, Frames};
use ringfence_papers::rtc::{Rtc, RtcAsPublished};
use ringfence_pgtable::Coherency;
use ringfence_pviommu::frontend::{DeviceCache, RtcSpace, UnknownUnmap};
use ringfence_pviommu::rtc::{
    Cycles, FlatRtc, MappingKey, NotCached, NotInUse, ResidencyPolicy, ReverseCache, RtcStats,
};
use ringfence_types::{DomainId, Iova, PhysAddr};

use super::{PviommuHost, PviommuTable, SharedHost, pviommu};
use crate::components::{AllocEnv, MakeTable, RcacheAlloc, ReplayTable, rcache};
use crate::error::LabError;
use crate::modes::{Alloc, FlushKind, Mode, TableKind};

/// Maximum number of cached mappings of a device; traces have fewer.
const MAX_CACHED_MAPPINGS: usize = 1 << 20;

/// Cycles into which the adaptive cache divides the bound of the other caches.
const ADAPTIVE_CYCLES: u8 = 250;

/// Reuses per thousand that may miss in the adaptive cache because they come too late.
const ADAPTIVE_LATE_PER_MILLE: u16 = 10;

/// T and C: a cache drops a released mapping at the latest at the (C + 1)th end of a cycle of
/// length T.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RtcParams {
    /// T in nanoseconds, not 0.
    pub cycle_ns: u64,
    /// C: the number of whole cycles.
    pub cycles: Cycles,
}

impl RtcParams {
    /// The values of the PVIOMMU paper: 10 s and 3.
    pub const PAPER: Self = Self {
        cycle_ns: Cycles::PAPER_SECONDS * 1_000_000_000,
        cycles: Cycles::PAPER,
    };

    /// Returns the bound T x (C + 1), in nanoseconds.
    pub fn bound_ns(&self) -> u64 {
        self.cycle_ns
            .saturating_mul(u64::from(self.cycles.get()) + 1)
    }

    /// Returns the same bound with the shortest cycles that a cache can count.
    fn fine(&self) -> Self {
        Self {
            cycle_ns: (self.bound_ns() / u64::from(ADAPTIVE_CYCLES)).max(1),
            cycles: Cycles::new(ADAPTIVE_CYCLES - 1).unwrap_or(self.cycles),
        }
    }

    /// Returns the parameters that apply to `mode`; `None` without a cache.
    pub fn for_mode(&self, mode: &Mode) -> Option<Self> {
        self.for_flush(mode.flush)
    }

    fn for_flush(&self, flush: FlushKind) -> Option<Self> {
        match flush {
            FlushKind::PerCycle | FlushKind::PerCycleAsPublished => Some(*self),
            FlushKind::PerCycleAdaptive => Some(self.fine()),
            _ => None,
        }
    }
}

impl Default for RtcParams {
    fn default() -> Self {
        Self::PAPER
    }
}

impl fmt::Display for RtcParams {
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
    /// Ringfence's table, whose residency follows reuse.
    Adaptive(Box<FlatRtc>),
    /// The PVIOMMU paper's cache, as published.
    AsPublished(Box<RtcAsPublished>),
}

impl ReverseCache for DynCache {
    #[inline]
    fn acquire(&mut self, key: MappingKey) -> Option<Iova> {
        match self {
            Self::Tree(cache) => cache.acquire(key),
            Self::Adaptive(cache) => cache.acquire(key),
            Self::AsPublished(cache) => cache.acquire(key),
        }
    }

    fn insert(&mut self, key: MappingKey, giova: Iova) -> Result<(), NotCached> {
        match self {
            Self::Tree(cache) => cache.insert(key, giova),
            Self::Adaptive(cache) => cache.insert(key, giova),
            Self::AsPublished(cache) => cache.insert(key, giova),
        }
    }

    #[inline]
    fn release(&mut self, key: MappingKey) -> Result<(), NotInUse> {
        match self {
            Self::Tree(cache) => cache.release(key),
            Self::Adaptive(cache) => cache.release(key),
            Self::AsPublished(cache) => cache.release(key),
        }
    }

    fn tick(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        match self {
            Self::Tree(cache) => cache.tick(expired),
            Self::Adaptive(cache) => cache.tick(expired),
            Self::AsPublished(cache) => cache.tick(expired),
        }
    }

    fn evict(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        match self {
            Self::Tree(cache) => cache.evict(expired),
            Self::Adaptive(cache) => cache.evict(expired),
            Self::AsPublished(cache) => cache.evict(expired),
        }
    }

    fn drain(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        match self {
            Self::Tree(cache) => cache.drain(expired),
            Self::Adaptive(cache) => cache.drain(expired),
            Self::AsPublished(cache) => cache.drain(expired),
        }
    }

    fn stats(&self) -> RtcStats {
        match self {
            Self::Tree(cache) => cache.stats(),
            Self::Adaptive(cache) => cache.stats(),
            Self::AsPublished(cache) => cache.stats(),
        }
    }
}

/// An address space behind a cache, with any allocator and table: those of a mode, or the meter's
/// stubs.
pub type DynRtcSpace<A = RcacheAlloc, T = PviommuTable> =
    RtcSpace<A, T, DynCache, RefCell<DeviceCache<DynCache>>>;

/// The flush policy of modes with a cache.
pub type CycleFlush = PerCycle<RefCell<RangeBatch>>;

/// The constructors of a mode with a cache.
#[derive(Debug, Clone, Copy)]
pub struct RtcParts {
    flush: FlushKind,
    /// Creates the table of a domain.
    pub(crate) table: MakeTable<PviommuTable>,
}

impl RtcParts {
    /// Returns the constructors of `mode`; `None` if it has no cache.
    pub(crate) fn of(mode: &Mode) -> Option<Self> {
        let cached = matches!(
            (mode.alloc, mode.table, mode.flush),
            (
                Alloc::LinuxRcache,
                TableKind::Radix,
                FlushKind::PerCycle | FlushKind::PerCycleAdaptive | FlushKind::PerCycleAsPublished,
            )
        );
        (cached && mode.owner.is_pviommu()).then(|| Self {
            flush: mode.flush,
            table: pviommu(mode.owner),
        })
    }

    /// Creates the flush policy.
    pub fn flush() -> CycleFlush {
        PerCycle::new(RefCell::new)
    }

    /// Returns the parameters that apply to this cache; `None` without a cache.
    pub fn cycling(self, cycling: RtcParams) -> Option<RtcParams> {
        cycling.for_flush(self.flush)
    }

    /// Puts a cache in front of an allocator and a table.
    pub fn with_cache<A, T>(self, paged: Paged<A, T>, cycling: RtcParams) -> DynRtcSpace<A, T> {
        let RtcParams { cycles, .. } = cycling;
        let (cache, cycle_ns, strays) = match self.flush {
            FlushKind::PerCycleAsPublished => {
                let cache = DynCache::AsPublished(Box::new(RtcAsPublished::new(
                    cycles,
                    MAX_CACHED_MAPPINGS,
                )));
                (cache, cycling.cycle_ns, UnknownUnmap::Ignored)
            }
            FlushKind::PerCycleAdaptive => {
                let RtcParams { cycle_ns, cycles } = cycling.fine();
                let residency = ResidencyPolicy::Adaptive {
                    late: ADAPTIVE_LATE_PER_MILLE,
                };
                let cache = FlatRtc::new(cycles, MAX_CACHED_MAPPINGS, residency);
                (
                    DynCache::Adaptive(Box::new(cache)),
                    cycle_ns,
                    UnknownUnmap::Refused,
                )
            }
            _ => {
                let cache = DynCache::Tree(Box::new(Rtc::new(cycles, MAX_CACHED_MAPPINGS)));
                (cache, cycling.cycle_ns, UnknownUnmap::Refused)
            }
        };
        RtcSpace::new(paged, cache, cycle_ns, strays, RefCell::new)
    }

    /// Creates the space of a domain. Returns it with the root of the table that the hardware
    /// walks.
    ///
    /// # Errors
    /// Memory is short.
    pub fn space(
        self,
        domain: DomainId,
        cycling: RtcParams,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        host: Option<&SharedHost<PviommuHost>>,
    ) -> Result<(DynRtcSpace, PhysAddr), LabError> {
        let table = (self.table)(domain, Coherency::Coherent, memory, frames, host)?;
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
            last_page: PviommuTable::LAST_PAGE,
        })
    }
}
