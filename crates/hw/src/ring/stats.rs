//! Event counters of a ring unit.

use crate::InvalidationCounts;

/// Counters of one ring unit since creation or [reset](crate::RingUnit::reset_stats).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RingStats {
    /// Accesses to the slot that the ring's entry holds.
    pub hits: u64,
    /// Accesses to the next slot, whose copy had been prefetched.
    pub prefetch_hits: u64,
    /// Accesses to any other slot of a ring that has an entry. Each reads one rPTE.
    pub slot_walks: u64,
    /// Accesses to a ring without an entry. Each reads the rRING, then the rPTE.
    pub misses: u64,
    /// Copies of a next slot stored in an entry.
    pub prefetches: u64,
    /// Deferred prefetches dropped because the queue was full, the oldest first.
    pub prefetches_dropped: u64,
    /// Entries evicted to make room for another ring.
    pub evictions: u64,
    /// Contexts and rDEVICEs read because they were not cached.
    pub context_misses: u64,
    /// Accesses passed through untranslated because the unit is disabled.
    pub passed_through: u64,
    /// Invalidations by requested scope.
    pub invalidations: InvalidationCounts,
    /// Accesses that the unit blocked.
    pub faults: u64,
}

/// Increments `counter`, which wraps on overflow.
#[inline]
pub(super) const fn count(counter: &mut u64) {
    *counter = counter.wrapping_add(1);
}
