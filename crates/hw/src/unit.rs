//! State of the walking unit: registers, caches and counters. Accesses enter in `translate.rs`,
//! invalidations in `invalidation.rs`.

use alloc::vec::Vec;

use ringfence_pgtable::{Dart, Levels};
use ringfence_types::{DomainId, PageSize, PhysAddr, PhysRange};

use crate::context_cache::{CachedContext, ContextCache};
use crate::walker::Walker;
use crate::{
    AdjacentPrefetch, ContextLookup, DartRegister, FaultLog, Geometry, HostBridge, HostBridges,
    IommuStats, Replacement, RootTable, WALK_CACHES,
};

/// Smallest scope that a unit can invalidate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum InvalidationGranularity {
    /// The unit supports page, domain and global invalidation.
    #[default]
    Selective,
    /// The unit supports only global invalidation. It widens page, domain and context requests to
    /// [`Invalidation::Global`](ringfence_types::Invalidation::Global).
    GlobalOnly,
}

/// Parameters of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitConfig {
    /// Geometry of the IOTLB.
    pub iotlb: Geometry,
    /// Geometries of the walk caches. The first caches pointers to level 1 tables.
    pub walk_caches: [Geometry; WALK_CACHES],
    /// Geometry of the context cache. It is direct-mapped: only the number of entries matters.
    pub contexts: Geometry,
    /// Replacement policy of the IOTLB and the walk caches.
    pub replacement: Replacement,
    /// Number of fault recording registers, at most [`FaultLog::MAX_CAPACITY`].
    pub fault_log: usize,
    /// Smallest scope that the unit can invalidate.
    pub granularity: InvalidationGranularity,
}

impl UnitConfig {
    /// A unit without caches. It reads every table on every access, so translations are never
    /// stale. Tests use it as the reference.
    pub const UNCACHED: Self = Self {
        iotlb: Geometry::ABSENT,
        walk_caches: [Geometry::ABSENT; WALK_CACHES],
        contexts: Geometry::ABSENT,
        replacement: Replacement::Lru,
        fault_log: FaultLog::MAX_CAPACITY,
        granularity: InvalidationGranularity::Selective,
    };
}

/// Global Status register, TES: translation enable status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TranslationState {
    Disabled,
    Enabled,
}

/// An IOMMU that walks page tables.
///
/// A unit accesses only memory, its registers and the invalidations it receives. It models one
/// piece of hardware, so the embedder must serialise its use.
#[derive(Debug, Clone)]
pub struct Iommu<D: ContextLookup> {
    pub(crate) context_lookup: D,
    pub(crate) translation_state: TranslationState,
    pub(crate) granularity: InvalidationGranularity,
    pub(crate) contexts: ContextCache<CachedContext<D::Format>>,
    pub(crate) walker: Walker,
    pub(crate) faults: FaultLog,
    /// Ranges of the last access that spanned several pages. Kept to reuse the allocation.
    pub(crate) ranges: Vec<PhysRange>,
    /// Sequence number of the last invalidation.
    pub(crate) last_ticket: u64,
}

/// A VT-d unit.
pub type VtdUnit = Iommu<RootTable>;

/// A unit with one flat table for all devices, as in PowerPC 970 machines.
pub type DartUnit = Iommu<DartRegister>;

/// A Calgary unit.
pub type CalgaryUnit = Iommu<HostBridges>;

impl<D: ContextLookup> Iommu<D> {
    /// Creates a unit that finds tables through `context_lookup`. Translation is disabled: every
    /// access is passed through untranslated.
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

    /// Enables translation (Global Command register, TE). Keeps cached entries.
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

    /// Sets the prefetch at each IOTLB miss; `None` turns it off, which is the default.
    pub fn set_adjacent_prefetch(&mut self, prefetch: Option<AdjacentPrefetch>) {
        self.walker.adjacent = prefetch;
    }

    /// Returns the smallest scope that the unit can invalidate.
    pub fn invalidation_granularity(&self) -> InvalidationGranularity {
        self.granularity
    }

    /// Returns the fault recording registers.
    pub fn faults(&mut self) -> &mut FaultLog {
        &mut self.faults
    }

    /// Returns the counters.
    pub fn stats(&self) -> &IommuStats {
        &self.walker.stats
    }

    /// Resets the counters to zero. Does not change the caches.
    pub fn reset_stats(&mut self) {
        self.walker.stats = IommuStats::default();
    }

    /// Returns the number of IOTLB entries in use.
    pub fn iotlb_live(&self) -> u32 {
        self.walker.iotlb.live()
    }

    /// Returns the number of walk cache entries in use, indexed by level - 1.
    pub fn walk_caches_live(&self) -> [u32; WALK_CACHES] {
        self.walker.walk_caches.live()
    }

    /// Drops all cached entries, including contexts.
    pub(crate) fn invalidate_all(&mut self) {
        self.contexts.clear();
        self.walker.iotlb.invalidate_all();
        self.walker.walk_caches.invalidate_all();
    }
}

impl VtdUnit {
    /// Creates a VT-d unit for tables of up to five levels and pages of up to 1 GiB. It is disabled
    /// and has no root table.
    pub fn vtd(config: &UnitConfig) -> Self {
        Self::new(
            config,
            RootTable::unprogrammed(Levels::Five, PageSize::Size1G),
        )
    }

    /// Lets the unit honour the contiguous hint of leaves, which no VT-d unit does, and drops all
    /// cached entries. By default, it ignores the hint.
    pub fn set_contiguous_hint(&mut self, honoured: bool) {
        self.context_lookup.set_contiguous_hint(honoured);
        self.invalidate_all();
    }

    /// Programs the root table address and drops all cached entries (Global Command register, SRTP,
    /// of a unit with capability ESRTPS). Until then, an enabled unit denies all DMA.
    pub fn set_root_table(&mut self, at: PhysAddr) {
        self.context_lookup.program(at);
        self.invalidate_all();
    }
}

impl DartUnit {
    /// Creates a DART without a table. It is disabled.
    pub fn dart(config: &UnitConfig) -> Self {
        Self::new(config, DartRegister::new())
    }

    /// Programs the table registers and drops all cached entries. All devices share the table.
    pub fn set_table(&mut self, domain: DomainId, format: Dart, root: PhysAddr) {
        self.context_lookup.program(domain, format, root);
        self.invalidate_all();
    }
}

impl CalgaryUnit {
    /// Creates a Calgary unit without bridges. It is disabled.
    pub fn calgary(config: &UnitConfig) -> Self {
        Self::new(config, HostBridges::new())
    }

    /// Programs the table address register of a host bridge and drops all cached entries. The
    /// bridge replaces all bridges that share a bus with it.
    pub fn set_bridge(&mut self, bridge: HostBridge) {
        self.context_lookup.program(bridge);
        self.invalidate_all();
    }

    /// Removes the bridge above `bus` and drops all cached entries. The unit denies DMA of the
    /// bridge's devices from then on.
    pub fn clear_bridge(&mut self, bus: u8) {
        self.context_lookup.remove(bus);
        self.invalidate_all();
    }
}
