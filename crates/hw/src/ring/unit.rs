//! The ring unit: registers, caches and counters.

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

/// Parameters of a ring unit. The rIOMMU paper specifies one entry per ring but not the number of
/// rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingUnitConfig {
    /// Geometry of the rIOTLB; one entry per ring, shared by all devices.
    pub riotlb: Geometry,
    /// Replacement policy of the rIOTLB.
    pub replacement: Replacement,
    /// Geometry of the cache of contexts and rDEVICEs. It is looked up only when a ring has no
    /// entry.
    pub contexts: Geometry,
    /// Time at which the unit reads the next slot.
    pub prefetch: Prefetch,
    /// Number of fault recording registers, at most [`FaultLog::MAX_CAPACITY`].
    pub fault_log: usize,
}

impl RingUnitConfig {
    /// A unit without caches. It reads every table on every access, so translations are never
    /// stale. Tests use it as the reference.
    pub const UNCACHED: Self = Self {
        riotlb: Geometry::ABSENT,
        replacement: Replacement::Lru,
        contexts: Geometry::ABSENT,
        prefetch: Prefetch::Absent,
        fault_log: FaultLog::MAX_CAPACITY,
    };
}

/// Cached context of a device: domain and rDEVICE (`get_domain` in the figure).
#[derive(Debug, Clone, Copy)]
pub(super) struct RingContext {
    pub(super) domain: DomainId,
    pub(super) rings: RingDevice,
}

/// State of a unit except its caches. Kept separate so that an rIOTLB entry and this state can be
/// borrowed mutably at the same time.
#[derive(Clone)]
pub(super) struct RingUnitState {
    pub(super) when: Prefetch,
    pub(super) waiting: DeferredPrefetches,
    pub(super) stats: RingStats,
    /// Address and reason of the last fault.
    pub(super) last_fault: (RingIova, FaultReason),
}

/// A ring IOMMU (rIOMMU section 4).
///
/// Like [`Iommu`](crate::Iommu), it accesses only memory, its registers and the invalidations it
/// receives. The embedder must serialise its use. The operating system must invalidate cached state
/// after a change:
///
/// | cached | invalidated by |
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
    /// Creates a unit without a root table. Translation is disabled: every access is passed through
    /// untranslated.
    pub fn new(config: &RingUnitConfig) -> Self {
        // Queue capacity: one prefetch per rIOTLB entry. A ring that moved on or lost its entry
        // leaves a stale request in the queue until it is completed.
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

    /// Programs the root table address and drops all cached entries. Until then, an enabled unit
    /// denies all DMA. The table belongs to this unit alone; a context in it attaches a device to
    /// this unit.
    pub fn set_root_table(&mut self, at: PhysAddr) {
        self.root = Some(at.align_down(PageSize::Size4K.bytes()));
        self.contexts.clear();
        self.riotlb.clear();
    }

    /// Enables translation. Keeps cached entries.
    pub fn enable(&mut self) {
        self.translation_state = TranslationState::Enabled;
    }

    /// Disables translation: every access is passed through untranslated. Keeps cached entries.
    pub fn disable(&mut self) {
        self.translation_state = TranslationState::Disabled;
    }

    /// Returns true if translation is enabled.
    pub fn is_enabled(&self) -> bool {
        self.translation_state == TranslationState::Enabled
    }

    /// Returns the fault recording registers.
    pub fn faults(&mut self) -> &mut FaultLog {
        &mut self.faults
    }

    /// Returns the counters.
    pub fn stats(&self) -> &RingStats {
        &self.state.stats
    }

    /// Resets the counters to zero. Does not change the caches.
    pub fn reset_stats(&mut self) {
        self.state.stats = RingStats::default();
    }

    /// Returns the number of rings with an rIOTLB entry.
    pub fn riotlb_live(&self) -> u32 {
        self.riotlb.live()
    }

    /// `get_domain`: reads root table, context table and rDEVICE.
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
            // A table or pass-through context belongs to a walking unit.
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
