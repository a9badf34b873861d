//! The ring unit: its registers, caches and counters.

use core::fmt;
use core::marker::PhantomData;

use ringfence_pgtable::{RingDevice, TranslationType, find_context};
use ringfence_types::{
    DomainId, FaultReason, Iova, PageSize, PhysAddr, PhysMemory, RequesterId, RingIova,
};

use super::logic::{FixedLogic, RingLogic};
use super::prefetch::{DeferredPrefetches, Prefetch};
use super::riotlb::Riotlb;
use super::stats::{RingStats, count};
use crate::context_cache::ContextCache;
use crate::unit::TranslationState;
use crate::{FaultLog, Geometry, Replacement};

/// The shape of a ring unit. The documents say one entry for a ring and leave open for how many
/// rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingUnitConfig {
    /// For how many rings, of all devices together, the rIOTLB has entries.
    pub riotlb: Geometry,
    /// Which ring of a full set loses its entry.
    pub replacement: Replacement,
    /// Devices whose context and rDEVICE are cached; looked into only where a ring has no entry.
    pub contexts: Geometry,
    /// When the next slot is read.
    pub prefetch: Prefetch,
    /// Fault recording registers, at most [`FaultLog::MAX_CAPACITY`].
    pub fault_log: usize,
}

impl RingUnitConfig {
    /// A unit without any cache: it reads every table for every access, and nothing is ever stale.
    /// The reference for all others.
    pub const UNCACHED: Self = Self {
        riotlb: Geometry::ABSENT,
        replacement: Replacement::Lru,
        contexts: Geometry::ABSENT,
        prefetch: Prefetch::Absent,
        fault_log: FaultLog::MAX_CAPACITY,
    };
}

/// What is cached of a device: its domain and its rDEVICE (the figure's `get_domain`).
#[derive(Debug, Clone, Copy)]
pub(super) struct RingContext {
    pub(super) domain: DomainId,
    pub(super) rings: RingDevice,
}

/// All of a unit but what it caches, so that an entry can be changed while it is counted and
/// queued.
#[derive(Clone)]
pub(super) struct RingUnitState {
    pub(super) when: Prefetch,
    pub(super) waiting: DeferredPrefetches,
    pub(super) stats: RingStats,
    /// Where and why the access was stopped that was stopped last.
    pub(super) last_fault: (RingIova, FaultReason),
}

/// A ring IOMMU (rIOMMU section 4).
///
/// Like [`Iommu`](crate::Iommu) it knows memory, its registers and the invalidations it is sent;
/// the embedder serialises its use. What it caches, and what must be invalidated when the operating
/// system changes it:
///
/// | cached | until |
/// |---|---|
/// | the current and the next rPTE of a ring, its rRING | `Invalidation::Ring`, or any wider one |
/// | context entry, rDEVICE | `Invalidation::Context` |
#[derive(Clone)]
pub struct RingUnit<L: RingLogic = FixedLogic> {
    root: Option<PhysAddr>,
    pub(super) translation_state: TranslationState,
    pub(super) riotlb: Riotlb,
    pub(super) contexts: ContextCache<RingContext>,
    pub(super) state: RingUnitState,
    pub(super) faults: FaultLog,
    /// Sequence number of the last invalidation.
    pub(super) last_ticket: u64,
    logic: PhantomData<L>,
}

impl<L: RingLogic> RingUnit<L> {
    /// A unit without a root table, switched off: every access is passed through untranslated.
    pub fn new(config: &RingUnitConfig) -> Self {
        // A ring waits for one prefetch at a time; those of rings that have lost their entry
        // meanwhile take the rest.
        let waiting = match config.prefetch {
            Prefetch::Deferred => config.riotlb.entries() as usize,
            Prefetch::Immediate | Prefetch::Absent => 0,
        };
        Self {
            root: None,
            translation_state: TranslationState::Disabled,
            riotlb: Riotlb::new(config.riotlb, config.replacement),
            contexts: ContextCache::new(config.contexts),
            state: RingUnitState {
                when: config.prefetch,
                waiting: DeferredPrefetches::new(waiting),
                stats: RingStats::default(),
                last_fault: (RingIova::from(Iova::ZERO), FaultReason::NotPresent),
            },
            faults: FaultLog::new(config.fault_log),
            last_ticket: 0,
            logic: PhantomData,
        }
    }

    /// Programs the root table's address and drops all that is cached. Before this an enabled unit
    /// denies every device. It is this unit's own: a device is attached to it by a context in this
    /// table.
    pub fn set_root_table(&mut self, at: PhysAddr) {
        self.root = Some(at.align_down(PageSize::Size4K.bytes()));
        self.contexts.clear();
        self.riotlb.clear();
    }

    /// Translates from now on. What is cached stays cached.
    pub fn enable(&mut self) {
        self.translation_state = TranslationState::Enabled;
    }

    /// Passes everything through from now on. What is cached stays cached.
    pub fn disable(&mut self) {
        self.translation_state = TranslationState::Disabled;
    }

    /// Whether the unit translates.
    pub fn is_enabled(&self) -> bool {
        self.translation_state == TranslationState::Enabled
    }

    /// The fault recording registers.
    pub fn faults(&mut self) -> &mut FaultLog {
        &mut self.faults
    }

    /// The counters.
    pub fn stats(&self) -> &RingStats {
        &self.state.stats
    }

    /// Counts from zero again; the caches are untouched.
    pub fn reset_stats(&mut self) {
        self.state.stats = RingStats::default();
    }

    /// Rings that have an entry in the rIOTLB.
    pub fn riotlb_live(&self) -> u32 {
        self.riotlb.live()
    }

    /// `get_domain`: root table, context table, rDEVICE.
    #[inline]
    pub(super) fn context<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
    ) -> Result<RingContext, FaultReason> {
        if let Some(cached) = self.contexts.lookup(device) {
            return Ok(*cached);
        }
        self.read_context(mem, device)
    }

    #[inline(never)]
    fn read_context<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
    ) -> Result<RingContext, FaultReason> {
        count(&mut self.state.stats.context_misses);
        let root = self.root.ok_or(FaultReason::Blocked)?;
        let context = find_context(mem, root, device).map_err(|error| error.fault_reason())?;
        let TranslationType::Rings { device: at } = context.translation else {
            // A table or a passing through is a walking unit's.
            return Err(FaultReason::ContextInvalid);
        };
        let read = RingContext {
            domain: context.domain,
            rings: RingDevice::read(mem, at).map_err(|error| error.fault_reason())?,
        };
        self.contexts.fill(device, read);
        Ok(read)
    }
}

impl<L: RingLogic> fmt::Debug for RingUnit<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingUnit")
            .field("root", &self.root)
            .field("power", &self.translation_state)
            .field("prefetch", &self.state.when)
            .field("riotlb_live", &self.riotlb.live())
            .field("stats", &self.state.stats)
            .finish_non_exhaustive()
    }
}
