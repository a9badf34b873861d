//! Requests in flight: their order, their answers, and the detection of protocol violations.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{Direction, Iova, PfnRange, RequesterId};

use super::{Queue, QueueFull, RequestId};
use crate::wire::{Devid, Gpa, PAGES_LIMIT, Status, encode_map, encode_unmap};

/// Parameters of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelOptions {
    /// Maximum number of pages in one request: the device's `pages_max`.
    pub pages_max: u32,
    /// Maximum number of consecutive empty polls while a request is in flight. Should correspond to
    /// ten seconds of polling.
    pub max_empty_polls: u64,
}

/// Reason why the channel is broken and sends no more requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChannelFailure {
    /// No answer within [`ChannelOptions::max_empty_polls`] polls.
    Silent,
    /// The host answered a request that is not in flight, answered one twice, or answered out of
    /// order.
    UnknownReply(RequestId),
    /// The queue is full although no request is in flight.
    Full,
    /// The host refused an unmap, so the device may still access its addresses.
    UnmapRefused(Status),
}

impl fmt::Display for ChannelFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => f.write_str("the host did not answer within the limit of polls"),
            Self::UnknownReply(id) => {
                write!(
                    f,
                    "the host replied to request {}, which is not in flight",
                    id.0
                )
            }
            Self::Full => f.write_str("the queue is full"),
            Self::UnmapRefused(status) => write!(f, "the host refused an unmap: {status}"),
        }
    }
}

impl core::error::Error for ChannelFailure {}

/// Reason why a map failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RemoteMapError {
    /// The host refused the map with this status.
    Status(Status),
    /// The channel broke before a valid answer. The pages may be mapped.
    Broken(ChannelFailure),
}

impl fmt::Display for RemoteMapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => status.fmt(f),
            Self::Broken(broken) => broken.fmt(f),
        }
    }
}

impl core::error::Error for RemoteMapError {}

impl From<ChannelFailure> for RemoteMapError {
    fn from(broken: ChannelFailure) -> Self {
        Self::Broken(broken)
    }
}

/// Counters of a channel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChannelStats {
    /// Map and unmap requests added to the queue.
    pub requests: u64,
    /// Notifications: at most one for all requests between two waits (kick merging).
    pub kicks: u64,
    /// Polls of the queue.
    pub polls: u64,
    /// Pages in map requests.
    pub mapped: u64,
    /// Pages in unmap requests.
    pub unmapped: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Map,
    Unmap,
}

#[derive(Debug)]
struct InFlight {
    id: RequestId,
    kind: Kind,
}

/// A map that the host refused after its caller had stopped waiting.
#[derive(Debug)]
struct LateRefusal {
    device: Devid,
    range: PfnRange,
}

/// A queue to one host. The sequence number of a request is the number of requests before it.
#[derive(Debug)]
pub struct Channel<Q> {
    queue: Q,
    options: ChannelOptions,
    /// In the order in which they were made available. The host answers in the same order.
    in_flight: VecDeque<InFlight>,
    /// Sequence number of the first unanswered request.
    answered: u64,
    /// Refused maps whose outcome was not queried yet.
    refused: Vec<(u64, Status)>,
    late_refusals: Vec<LateRefusal>,
    /// For each table: its device, and the number of pages that the host may have mapped.
    live: Vec<(Devid, Arc<AtomicU64>)>,
    /// True if requests were added since the last kick.
    needs_kick: bool,
    /// Number of consecutive polls without an answer.
    empty_polls: u64,
    failure: Option<ChannelFailure>,
    request: Vec<u8>,
    stats: ChannelStats,
}

impl<Q: Queue> Channel<Q> {
    /// Creates a channel over an empty queue.
    pub fn new(queue: Q, options: ChannelOptions) -> Self {
        let pages_max = options.pages_max.clamp(1, PAGES_LIMIT);
        Self {
            queue,
            options: ChannelOptions {
                pages_max,
                ..options
            },
            in_flight: VecDeque::new(),
            answered: 0,
            refused: Vec::new(),
            late_refusals: Vec::new(),
            live: Vec::new(),
            needs_kick: false,
            empty_polls: 0,
            failure: None,
            request: Vec::new(),
            stats: ChannelStats::default(),
        }
    }

    /// Queues a map request and returns its sequence number.
    ///
    /// # Errors
    /// The channel is broken.
    pub(super) fn map(
        &mut self,
        device: Devid,
        direction: Direction,
        pages: impl ExactSizeIterator<Item = (Iova, Gpa)> + Clone,
    ) -> Result<u64, ChannelFailure> {
        let count = pages.len() as u64;
        let mut request = core::mem::take(&mut self.request);
        request.clear();
        // Fails only for no pages or too many, which no caller passes. The host would reject it.
        let _ = encode_map(&mut request, device, direction, pages);
        let sequence = self.add(&request, Kind::Map);
        self.request = request;
        self.stats.mapped = self.stats.mapped.saturating_add(count);
        sequence
    }

    /// Queues an unmap request and returns its sequence number.
    ///
    /// # Errors
    /// The channel is broken.
    pub(super) fn unmap(
        &mut self,
        device: Devid,
        giovas: impl ExactSizeIterator<Item = Iova>,
    ) -> Result<u64, ChannelFailure> {
        let count = giovas.len() as u64;
        let mut request = core::mem::take(&mut self.request);
        request.clear();
        let _ = encode_unmap(&mut request, device, giovas);
        let sequence = self.add(&request, Kind::Unmap);
        self.request = request;
        self.stats.unmapped = self.stats.unmapped.saturating_add(count);
        sequence
    }

    fn add(&mut self, request: &[u8], kind: Kind) -> Result<u64, ChannelFailure> {
        loop {
            if let Some(broken) = self.failure {
                return Err(broken);
            }
            match self.queue.add(request) {
                Ok(id) => {
                    let sequence = self.next_sequence();
                    self.in_flight.push_back(InFlight { id, kind });
                    self.needs_kick = true;
                    self.stats.requests = self.stats.requests.saturating_add(1);
                    return Ok(sequence);
                }
                // Wait for an answer to make room, until the channel breaks.
                Err(QueueFull) if self.in_flight.is_empty() => {
                    return Err(self.fail(ChannelFailure::Full));
                }
                Err(QueueFull) => {
                    self.kick();
                    self.poll();
                    core::hint::spin_loop();
                }
            }
        }
    }

    /// Notifies the host if requests were added since the last kick.
    pub fn kick(&mut self) {
        if core::mem::take(&mut self.needs_kick) && self.failure.is_none() {
            self.queue.kick();
            self.stats.kicks = self.stats.kicks.saturating_add(1);
        }
    }

    /// Processes the available answers.
    pub fn poll(&mut self) {
        if self.failure.is_some() {
            return;
        }
        self.stats.polls = self.stats.polls.saturating_add(1);
        let mut found = false;
        while let Some(used) = self.queue.poll() {
            found = true;
            let Some(next) = self.in_flight.front().filter(|next| next.id == used.id) else {
                self.fail(ChannelFailure::UnknownReply(used.id));
                return;
            };
            let status = Status::from_raw(used.status);
            match (next.kind, status) {
                (_, Status::Ok) => {}
                (Kind::Map, status) => self.refused.push((self.answered, status)),
                (Kind::Unmap, status) => {
                    // Fail before counting the request as answered, so that no waiter takes the
                    // unmap for confirmed.
                    self.fail(ChannelFailure::UnmapRefused(status));
                    return;
                }
            }
            self.in_flight.pop_front();
            self.answered = self.answered.saturating_add(1);
        }
        if found || self.in_flight.is_empty() {
            self.empty_polls = 0;
            return;
        }
        self.empty_polls = self.empty_polls.saturating_add(1);
        if self.empty_polls > self.options.max_empty_polls {
            self.fail(ChannelFailure::Silent);
        }
    }

    /// Returns the outcome of the map with sequence number `sequence`; `None` while it is in
    /// flight. Call this at most once after an answer.
    pub(super) fn outcome(&mut self, sequence: u64) -> Option<Result<(), RemoteMapError>> {
        if sequence < self.answered {
            let found = self.refused.iter().position(|(of, _)| *of == sequence);
            return Some(match found {
                Some(at) => Err(RemoteMapError::Status(self.refused.swap_remove(at).1)),
                None => Ok(()),
            });
        }
        self.failure.map(|broken| Err(broken.into()))
    }

    /// Returns true if the host has answered every request before `sequence`. All unmaps among them
    /// are then confirmed.
    ///
    /// # Errors
    /// The channel broke before it received the answers.
    pub(super) fn is_confirmed(&self, sequence: u64) -> Result<bool, ChannelFailure> {
        match self.failure {
            _ if self.answered >= sequence => Ok(true),
            Some(broken) => Err(broken),
            None => Ok(false),
        }
    }

    /// Returns the sequence number of the next request.
    pub(super) fn next_sequence(&self) -> u64 {
        self.answered.saturating_add(self.in_flight.len() as u64)
    }

    /// Adds a table of `device`. Returns the counter of its pages that the host may have mapped.
    pub(super) fn add_table(&mut self, device: Devid) -> Arc<AtomicU64> {
        // Keep counters of dropped tables whose pages are mapped: the device still reaches them.
        self.live
            .retain(|(_, live)| Arc::strong_count(live) > 1 || live.load(Ordering::Relaxed) > 0);
        let live = Arc::new(AtomicU64::new(0));
        self.live.push((device, Arc::clone(&live)));
        live
    }

    /// Returns true if `device` has a table here, and all its unmaps are queued.
    pub(super) fn is_unused(&self, device: RequesterId) -> bool {
        let id = u64::from(device.get());
        let tables = self.live.iter();
        let mut pages = tables
            .filter(|(devid, _)| devid.get() & 0xffff == id)
            .map(|(_, live)| live.load(Ordering::Relaxed));
        pages.next() == Some(0) && pages.all(|pages| pages == 0)
    }

    /// Records a map that the host refused when its caller no longer waited.
    pub(super) fn note_late_refusal(&mut self, device: Devid, range: PfnRange) {
        self.late_refusals.push(LateRefusal { device, range });
    }

    /// Returns true if the host refused a part of `range` late.
    pub(super) fn has_late_refusal(&self, device: Devid, range: &PfnRange) -> bool {
        let within = |late: &LateRefusal| late.device == device && late.range.overlaps(range);
        self.late_refusals.iter().any(within)
    }

    /// Removes and returns the late refusals that overlap `range`.
    pub(super) fn take_late_refusals(&mut self, device: Devid, range: &PfnRange) -> Vec<PfnRange> {
        let mut ranges = Vec::new();
        self.late_refusals.retain(|late| {
            let within = late.device == device && late.range.overlaps(range);
            if within {
                ranges.push(late.range);
            }
            !within
        });
        ranges
    }

    /// Returns the reason if the channel is broken.
    pub const fn failure(&self) -> Option<ChannelFailure> {
        self.failure
    }

    /// Returns the counters.
    pub const fn stats(&self) -> &ChannelStats {
        &self.stats
    }

    /// Returns the parameters.
    pub const fn options(&self) -> &ChannelOptions {
        &self.options
    }

    /// Returns the queue.
    pub const fn queue(&mut self) -> &mut Q {
        &mut self.queue
    }

    #[cold]
    fn fail(&mut self, why: ChannelFailure) -> ChannelFailure {
        *self.failure.get_or_insert(why)
    }
}
