//! The unit: its registers, caches and counters.

use alloc::vec::Vec;

use ringfence_pgtable::Levels;
use ringfence_types::{PageSize, PhysAddr, PhysRange};

use crate::context_cache::{CachedContext, ContextCache};
use crate::walker::Walker;
use crate::{
    ContextLookup, FaultLog, Geometry, HostBridge, HostBridges, IommuStats, Replacement, RootTable,
    WALK_CACHES,
};

/// Whether a unit can purge less than everything (HW07).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum InvalidationGranularity {
    /// Page ranges and domains.
    #[default]
    Selective,
    /// All of it or nothing: every request is widened to
    /// [`Invalidation::Global`](ringfence_types::Invalidation::Global).
    GlobalOnly,
}

/// What a unit is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitConfig {
    /// The IOTLB.
    pub iotlb: Geometry,
    /// The walk caches; the first holds pointers to tables of level 1.
    pub walk_caches: [Geometry; WALK_CACHES],
    /// The context cache, direct-mapped: only the number of entries counts.
    pub contexts: Geometry,
    /// How the IOTLB and the walk caches replace.
    pub replacement: Replacement,
    /// Fault recording registers, at most [`FaultLog::MAX_CAPACITY`].
    pub fault_log: usize,
    /// What the unit can purge.
    pub granularity: InvalidationGranularity,
}

impl UnitConfig {
    /// A unit without any cache: it reads every table for every access, and nothing is ever stale.
    /// The reference for all others.
    pub const UNCACHED: Self = Self {
        iotlb: Geometry::ABSENT,
        walk_caches: [Geometry::ABSENT; WALK_CACHES],
        contexts: Geometry::ABSENT,
        replacement: Replacement::Lru,
        fault_log: FaultLog::MAX_CAPACITY,
        granularity: InvalidationGranularity::Selective,
    };
}

/// Whether a unit translates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TranslationState {
    Disabled,
    Enabled,
}

/// An I/O memory management unit.
///
/// It knows memory, its registers and the invalidations it is sent, and nothing of who wrote the
/// tables. It is one piece of hardware: the embedder serialises its use.
#[derive(Debug, Clone)]
pub struct Iommu<D: ContextLookup> {
    pub(crate) context_lookup: D,
    pub(crate) translation_state: TranslationState,
    pub(crate) granularity: InvalidationGranularity,
    pub(crate) contexts: ContextCache<CachedContext<D::Format>>,
    pub(crate) walker: Walker,
    pub(crate) faults: FaultLog,
    /// The ranges of the last access of several pages; kept for its storage.
    pub(crate) ranges: Vec<PhysRange>,
    /// Sequence number of the last invalidation.
    pub(crate) last_ticket: u64,
}

/// A VT-d unit.
pub type VtdUnit = Iommu<RootTable>;

/// A Calgary unit.
pub type CalgaryUnit = Iommu<HostBridges>;

impl<D: ContextLookup> Iommu<D> {
    /// A unit that finds tables by `context_lookup`, switched off: every access is passed through
    /// untranslated.
    pub fn new(config: &UnitConfig, context_lookup: D) -> Self {
        Self {
            context_lookup,
            translation_state: TranslationState::Disabled,
            granularity: config.granularity,
            contexts: ContextCache::new(config.contexts),
            walker: Walker::new(config),
            faults: FaultLog::new(config.fault_log),
            ranges: Vec::new(),
            last_ticket: 0,
        }
    }

    /// Translates from now on (Global Command register, TE). What is cached stays cached.
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

    /// What the unit can purge.
    pub fn invalidation_granularity(&self) -> InvalidationGranularity {
        self.granularity
    }

    /// The fault recording registers.
    pub fn faults(&mut self) -> &mut FaultLog {
        &mut self.faults
    }

    /// The counters.
    pub fn stats(&self) -> &IommuStats {
        &self.walker.stats
    }

    /// Counts from zero again; the caches are untouched.
    pub fn reset_stats(&mut self) {
        self.walker.stats = IommuStats::default();
    }

    /// The IOTLB's entries in use.
    pub fn iotlb_live(&self) -> u32 {
        self.walker.iotlb.live()
    }

    /// The walk caches' entries in use, by level less one.
    pub fn walk_caches_live(&self) -> [u32; WALK_CACHES] {
        self.walker.walk_caches.live()
    }

    /// Drops all that is cached, contexts included.
    pub(crate) fn invalidate_all(&mut self) {
        self.contexts.clear();
        self.walker.iotlb.invalidate_all();
        self.walker.walk_caches.invalidate_all();
    }
}

impl VtdUnit {
    /// A VT-d unit for tables of up to five levels and pages of up to 1 GiB, switched off and
    /// without a root table.
    pub fn vtd(config: &UnitConfig) -> Self {
        Self::new(
            config,
            RootTable::unprogrammed(Levels::Five, PageSize::Size1G),
        )
    }

    /// Programs the root table's address and drops all that is cached (Global Command register,
    /// SRTP, of a unit with capability ESRTPS). Before this an enabled unit denies every device.
    pub fn set_root_table(&mut self, at: PhysAddr) {
        self.context_lookup.program(at);
        self.invalidate_all();
    }
}

impl CalgaryUnit {
    /// A Calgary unit without bridges, switched off.
    pub fn calgary(config: &UnitConfig) -> Self {
        Self::new(config, HostBridges::new())
    }

    /// Programs the table address register of a host bridge, in place of those that share a bus
    /// with it, and drops all that is cached.
    pub fn set_bridge(&mut self, bridge: HostBridge) {
        self.context_lookup.program(bridge);
        self.invalidate_all();
    }
}
