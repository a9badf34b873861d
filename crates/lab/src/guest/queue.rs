//! What goes through a queue is counted here.

/// What the guest waits for when it kicks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KickCause {
    /// A map.
    Map,
    /// An unmap, or a flush.
    Unmap,
}

/// What a host did to find the frames of its guest's pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LookupStats {
    /// Walks of the second stage.
    pub walks: u64,
    /// Entries found through the pointer to the last table, without a walk.
    pub through_pointer: u64,
    /// Words of the second stage read by both.
    pub reads: u64,
    /// Frames given to pages that had none.
    pub frames: u64,
    /// Those of them that the host's allocator was asked for while the guest waited.
    pub frames_awaited: u64,
}

/// What went through a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Requests to map or to unmap.
    pub requests: u64,
    /// Notifications of the host while a map waited.
    pub kicks_in_maps: u64,
    /// Notifications of the host while an unmap or a flush waited.
    pub kicks_in_unmaps: u64,
    /// Invalidations that the host had the unit complete.
    pub invalidations: u64,
    /// How the host found the guest's memory, if it has to look for it.
    pub lookups: LookupStats,
}

impl QueueStats {
    /// The host is notified.
    #[inline]
    pub(super) fn kick(&mut self, cause: KickCause) {
        match cause {
            KickCause::Map => self.kicks_in_maps += 1,
            KickCause::Unmap => self.kicks_in_unmaps += 1,
        }
    }
}
