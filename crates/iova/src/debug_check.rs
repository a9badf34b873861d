//! Tracks allocated ranges in debug builds, for caches that cannot detect a double free.

use ringfence_types::PfnRange;

/// The set of allocated ranges in debug builds; empty in release builds.
///
/// An allocator that caches freed ranges in front of an index cannot detect a second free of a
/// range.
#[derive(Debug, Default)]
pub(crate) struct DebugCheck {
    #[cfg(debug_assertions)]
    ranges: alloc::collections::BTreeMap<u64, u64>,
}

impl DebugCheck {
    /// True if calls have an effect. Callers test it before they take a lock for a call.
    pub(crate) const CHECKED: bool = cfg!(debug_assertions);

    /// Records that a range was allocated.
    #[inline]
    pub(crate) fn insert(&mut self, range: PfnRange) {
        #[cfg(debug_assertions)]
        self.ranges.insert(range.lo().get(), range.hi().get());
        let _ = range;
    }

    /// Records that a range is freed. Returns false if it was not allocated with these ends.
    #[inline]
    pub(crate) fn remove(&mut self, range: PfnRange) -> bool {
        #[cfg(debug_assertions)]
        {
            if self.ranges.get(&range.lo().get()) != Some(&range.hi().get()) {
                return false;
            }
            self.ranges.remove(&range.lo().get());
        }
        let _ = range;
        true
    }
}
