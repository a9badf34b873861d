//! The operating system's handler of I/O page faults (Linux: `drivers/iommu/io-pgfault.c`).

use std::collections::BTreeMap;

use ringfence_hw::{
    GroupPosition, PageGroupResponse, PageRequest, PageRequestQueue, PrgIndex, ResponseCode,
};
use ringfence_types::RequesterId;

/// Serves page requests and makes one response for each group, with the worst result of its
/// requests.
#[derive(Debug, Clone)]
pub struct PageFaultHandler {
    /// Worst result so far of each group whose last request has not arrived.
    partial: BTreeMap<(RequesterId, PrgIndex), ResponseCode>,
    limit: usize,
    stats: HandlerStats,
}

/// Counters of a handler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandlerStats {
    /// Requests that were resolved.
    pub served: u64,
    /// Requests that were not resolved because too many groups lacked their last request.
    pub discarded: u64,
    /// Responses by code: success, invalid request, failure.
    pub responses: [u64; 3],
}

impl PageFaultHandler {
    /// Creates a handler that keeps at most `limit` incomplete groups.
    pub const fn new(limit: usize) -> Self {
        Self {
            partial: BTreeMap::new(),
            limit,
            stats: HandlerStats {
                served: 0,
                discarded: 0,
                responses: [0; 3],
            },
        }
    }

    /// Returns the counters.
    pub fn stats(&self) -> &HandlerStats {
        &self.stats
    }

    /// Drops the incomplete groups of `device`, when it is detached or its page requests are
    /// disabled.
    pub fn discard(&mut self, device: RequesterId) {
        self.partial.retain(|(other, _), _| *other != device);
    }

    /// Serves at most `budget` requests of `queue`, oldest first. `resolve` maps the requested
    /// page, or returns the reason why not. Returns the responses in order. If the queue lost
    /// requests, clears the overflow once it is empty.
    pub fn serve(
        &mut self,
        queue: &mut PageRequestQueue,
        budget: usize,
        mut resolve: impl FnMut(&PageRequest) -> ResponseCode,
    ) -> Vec<PageGroupResponse> {
        let mut responses = Vec::new();
        for _ in 0..budget {
            let Some(request) = queue.take() else {
                break;
            };
            responses.extend(self.serve_one(&request, &mut resolve));
        }
        if queue.is_empty() {
            queue.clear_overflow();
        }
        responses
    }

    fn serve_one(
        &mut self,
        request: &PageRequest,
        resolve: &mut impl FnMut(&PageRequest) -> ResponseCode,
    ) -> Option<PageGroupResponse> {
        let key = (request.device, request.group);
        let before = self.partial.get(&key).copied();
        if request.position == GroupPosition::More
            && before.is_none()
            && self.partial.len() >= self.limit
        {
            // The page stays unmapped, so the device requests it again.
            self.stats.discarded += 1;
            return None;
        }
        self.stats.served += 1;
        let code = resolve(request).max(before.unwrap_or(ResponseCode::Success));
        match request.position {
            GroupPosition::More => {
                self.partial.insert(key, code);
                None
            }
            GroupPosition::Last => {
                self.partial.remove(&key);
                let [success, invalid, failure] = &mut self.stats.responses;
                *match code {
                    ResponseCode::Success => success,
                    ResponseCode::InvalidRequest => invalid,
                    ResponseCode::ResponseFailure => failure,
                } += 1;
                Some(PageGroupResponse {
                    device: request.device,
                    group: request.group,
                    code,
                })
            }
        }
    }
}
