//! What goes through a queue is counted here.

/// What the guest waits for when it kicks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A map.
    Map,
    /// An unmap, or a flush.
    Unmap,
}

/// What went through a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests to map or to unmap.
    pub requests: u64,
    /// Notifications of the host while a map waited.
    pub kicks_in_maps: u64,
    /// Notifications of the host while an unmap or a flush waited.
    pub kicks_in_unmaps: u64,
    /// Invalidations that the host had the unit complete.
    pub invalidations: u64,
}

impl Traffic {
    /// The host is notified.
    #[inline]
    pub(super) fn kick(&mut self, cause: Cause) {
        match cause {
            Cause::Map => self.kicks_in_maps += 1,
            Cause::Unmap => self.kicks_in_unmaps += 1,
        }
    }
}
