//! What the unit has done, counted.

use crate::WALK_CACHES;

/// Counters of one unit since it was made or [reset](crate::Iommu::reset_stats). A lookup is one
/// page of one access.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IommuStats {
    /// Pages found in the IOTLB.
    pub iotlb_hits: u64,
    /// Pages not found in the IOTLB: each costs a walk.
    pub iotlb_misses: u64,
    /// Entries that had to go to make room for others.
    pub iotlb_evictions: u64,
    /// Words read from tables by walks. Four for each walk of a four-level table without walk
    /// caches (HW14).
    pub walk_references: u64,
    /// Walks that began at a cached table, by its level less one: F&S's L3, L2, L1 in this order.
    pub walk_cache_hits: [u64; WALK_CACHES],
    /// Walk caches looked into in vain, by level less one.
    pub walk_cache_misses: [u64; WALK_CACHES],
    /// Contexts read from memory because the context cache did not hold them.
    pub context_misses: u64,
    /// Accesses that were passed through untranslated: the unit is off, or the device's context
    /// says so.
    pub passed_through: u64,
    /// Invalidations by pages, domain, everything, and context, as they were asked for.
    pub invalidations: InvalidationCounts,
    /// Invalidations that purged more than was asked for, because the unit can do no less.
    pub widened: u64,
    /// Accesses stopped.
    pub faults: u64,
}

/// Invalidations by the scope asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InvalidationCounts {
    /// Of a range of pages.
    pub pages: u64,
    /// Of a domain.
    pub domain: u64,
    /// Of all domains.
    pub global: u64,
    /// Of one device's context.
    pub context: u64,
    /// Of one ring.
    pub ring: u64,
}

impl InvalidationCounts {
    /// All of them.
    pub const fn total(&self) -> u64 {
        self.pages
            .wrapping_add(self.domain)
            .wrapping_add(self.global)
            .wrapping_add(self.context)
            .wrapping_add(self.ring)
    }
}

impl IommuStats {
    /// Pages looked up in the IOTLB.
    pub const fn lookups(&self) -> u64 {
        self.iotlb_hits.wrapping_add(self.iotlb_misses)
    }
}
