//! The page request queue of a unit (VT-d specification, section 7.4; RISC-V IOMMU specification,
//! section 3.3 "Page-request-queue").

use alloc::collections::VecDeque;

use crate::{GroupPosition, PageGroupResponse, PageRequest, ResponseCode};

/// A bounded queue from the unit to software. A request that finds the queue full is lost and sets
/// the overflow bit (PRO). No request is queued while PRO is set; software must clear it.
///
/// The unit answers a lost request that is the last of its group with success, and the device tries
/// again. Without this automatic response, the device would never stop waiting.
#[derive(Debug, Clone)]
pub struct PageRequestQueue {
    requests: VecDeque<PageRequest>,
    capacity: usize,
    overflowed: bool,
    stats: PageRequestStats,
}

/// Counters of page requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageRequestStats {
    /// Requests that entered the queue.
    pub queued: u64,
    /// Requests lost because the queue was full or PRO was set.
    pub lost: u64,
    /// Requests of devices that may not make page requests.
    pub blocked: u64,
}

impl PageRequestQueue {
    /// Largest capacity: 2^7 pages of 256 entries (PQS).
    pub const MAX_CAPACITY: usize = 1 << 15;

    /// Creates a queue of `capacity` requests, at most [`MAX_CAPACITY`](Self::MAX_CAPACITY).
    pub fn new(capacity: usize) -> Self {
        Self {
            requests: VecDeque::new(),
            capacity: capacity.min(Self::MAX_CAPACITY),
            overflowed: false,
            stats: PageRequestStats::default(),
        }
    }

    /// Queues `request`. Returns the automatic response of a lost request.
    pub(super) fn push(&mut self, request: &PageRequest) -> Option<PageGroupResponse> {
        if self.overflowed || self.requests.len() >= self.capacity {
            self.overflowed = true;
            self.stats.lost = self.stats.lost.wrapping_add(1);
            return automatic(request, ResponseCode::Success);
        }
        self.stats.queued = self.stats.queued.wrapping_add(1);
        self.requests.push_back(*request);
        None
    }

    /// Counts `request` as blocked. Returns its automatic response.
    pub(super) fn block(&mut self, request: &PageRequest) -> Option<PageGroupResponse> {
        self.stats.blocked = self.stats.blocked.wrapping_add(1);
        automatic(request, ResponseCode::InvalidRequest)
    }

    /// Removes and returns the oldest request.
    pub fn take(&mut self) -> Option<PageRequest> {
        self.requests.pop_front()
    }

    /// Returns the number of queued requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Returns true if no request is queued.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Returns true if a request was lost since [`clear_overflow`](Self::clear_overflow) (PRO).
    pub fn overflowed(&self) -> bool {
        self.overflowed
    }

    /// Clears PRO, which resumes queuing.
    pub fn clear_overflow(&mut self) {
        self.overflowed = false;
    }

    /// Returns the counters.
    pub fn stats(&self) -> &PageRequestStats {
        &self.stats
    }
}

/// Only the last request of a group has a response.
fn automatic(request: &PageRequest, code: ResponseCode) -> Option<PageGroupResponse> {
    match request.position {
        GroupPosition::More => None,
        GroupPosition::Last => Some(PageGroupResponse {
            device: request.device,
            group: request.group,
            code,
        }),
    }
}
