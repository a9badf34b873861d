//! Event counters of a unit.

use crate::WALK_CACHES;

/// Counters of one unit since creation or [reset](crate::Iommu::reset_stats). One lookup is one
/// page of one access.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IommuStats {
    /// Pages found in the IOTLB.
    pub iotlb_hits: u64,
    /// Pages not found in the IOTLB; each miss costs a walk.
    pub iotlb_misses: u64,
    /// Entries evicted to make room for others.
    pub iotlb_evictions: u64,
    /// Words that walks read from tables. A walk of a four-level table without walk caches reads
    /// four.
    pub walk_references: u64,
    /// Walks that started at a cached table, indexed by level - 1: L3, L2, L1 in the terms of F&S.
    pub walk_cache_hits: [u64; WALK_CACHES],
    /// Walk cache lookups that missed, indexed by level - 1.
    pub walk_cache_misses: [u64; WALK_CACHES],
    /// Pages that a prefetch cached.
    pub prefetched: u64,
    /// Words that prefetches read from tables; not part of `walk_references`.
    pub prefetch_references: u64,
    /// Contexts read from memory because the context cache missed.
    pub context_misses: u64,
    /// Accesses passed through untranslated, because the unit is disabled or the context selects
    /// pass-through.
    pub passed_through: u64,
    /// Invalidations by requested scope.
    pub invalidations: InvalidationCounts,
    /// Invalidations that purged more than requested. Either the unit supports only global
    /// invalidation, or it no longer knew the domain of a context.
    pub widened: u64,
    /// Accesses that the unit blocked.
    pub faults: u64,
}

/// Invalidations by requested scope.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InvalidationCounts {
    /// Invalidations of page ranges.
    pub pages: u64,
    /// Invalidations of a domain.
    pub domain: u64,
    /// Invalidations of the translations of all domains.
    pub global: u64,
    /// Invalidations of a device's context.
    pub context: u64,
    /// Invalidations of a ring.
    pub ring: u64,
}

impl InvalidationCounts {
    /// Returns the sum of all counters.
    pub const fn total(&self) -> u64 {
        self.pages
            .wrapping_add(self.domain)
            .wrapping_add(self.global)
            .wrapping_add(self.context)
            .wrapping_add(self.ring)
    }
}

impl IommuStats {
    /// Returns the number of pages looked up in the IOTLB.
    pub const fn lookups(&self) -> u64 {
        self.iotlb_hits.wrapping_add(self.iotlb_misses)
    }
}
