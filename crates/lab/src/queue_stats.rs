//! Counters of a guest's queue to its host.

/// The reason for a kick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KickCause {
    /// The guest waits for a map.
    Map,
    /// The guest waits for an unmap or a flush.
    Unmap,
}

/// Work of a host to find the frames of guest pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LookupStats {
    /// Walks of the second stage.
    pub walks: u64,
    /// Entries found through the pointer to the last table, without a walk.
    pub through_pointer: u64,
    /// Words of the second stage that both read.
    pub reads: u64,
    /// Frames given to pages without one.
    pub frames: u64,
    /// Those of `frames` that the host's allocator supplied while the guest waited.
    pub frames_awaited: u64,
}

/// Counters of a queue and its host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Map and unmap requests.
    pub requests: u64,
    /// Notifications of the host while a map waited.
    pub kicks_in_maps: u64,
    /// Notifications of the host while an unmap or a flush waited.
    pub kicks_in_unmaps: u64,
    /// Invalidations that the host requested and the unit completed.
    pub invalidations: u64,
    /// Lookups of guest memory by the host; zeros if guest-physical addresses equal physical ones.
    pub lookups: LookupStats,
}

impl QueueStats {
    /// Counts a notification of the host.
    #[inline]
    pub(crate) fn kick(&mut self, cause: KickCause) {
        match cause {
            KickCause::Map => self.kicks_in_maps += 1,
            KickCause::Unmap => self.kicks_in_unmaps += 1,
        }
    }
}
