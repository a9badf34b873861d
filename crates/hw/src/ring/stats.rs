//! What a ring unit has done, counted.

use crate::InvalidationCounts;

/// Counters of one ring unit since it was made or [reset](crate::RingUnit::reset_stats).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RingStats {
    /// Accesses to the slot that the ring's entry holds.
    pub hits: u64,
    /// Accesses to the slot after it, whose copy had been prefetched.
    pub prefetch_hits: u64,
    /// Accesses to any other slot of a ring that has an entry: one rPTE is read.
    pub slot_walks: u64,
    /// Accesses to a ring that has no entry: its rRING is read, then the rPTE.
    pub misses: u64,
    /// Copies of a next slot that were put into an entry.
    pub prefetches: u64,
    /// Prefetches put off for which the unit had no room.
    pub prefetches_dropped: u64,
    /// Entries that had to go to make room for another ring's.
    pub evictions: u64,
    /// Contexts and rDEVICEs read because they were not cached.
    pub context_misses: u64,
    /// Accesses passed through untranslated: the unit is off.
    pub passed_through: u64,
    /// Invalidations, as they were asked for.
    pub invalidations: InvalidationCounts,
    /// Accesses stopped.
    pub faults: u64,
}

/// Counts one more.
#[inline]
pub(super) const fn count(counter: &mut u64) {
    *counter = counter.wrapping_add(1);
}
