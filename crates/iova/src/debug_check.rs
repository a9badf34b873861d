//! What caches cannot know by themselves, and debug builds check: which ranges are handed out.

use ringfence_types::PfnRange;

/// The set of ranges handed out in debug builds; nothing in release builds.
///
/// Allocators that keep freed ranges in front of an index cannot tell a range freed twice from one
/// freed once.
#[derive(Debug, Default)]
pub(crate) struct DebugCheck {
    #[cfg(debug_assertions)]
    ranges: alloc::collections::BTreeMap<u64, u64>,
}

impl DebugCheck {
    /// Whether calls have an effect, for callers that would have to take a lock for them.
    pub(crate) const CHECKED: bool = cfg!(debug_assertions);

    /// A range was handed out.
    #[inline]
    pub(crate) fn insert(&mut self, range: PfnRange) {
        #[cfg(debug_assertions)]
        self.ranges.insert(range.lo().get(), range.hi().get());
        let _ = range;
    }

    /// A range comes back; `false` if it was not handed out like this.
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
