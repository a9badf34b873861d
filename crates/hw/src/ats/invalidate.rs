//! Invalidate requests to device TLBs and their completions (PCI Express Base Specification,
//! section 10.3; VT-d specification, section 6.5.2.5).
//!
//! The unit sends an invalidate request with a tag, and the device answers with an invalidate
//! completion that carries the tag. Until then, the device may use the old translation.

use alloc::collections::VecDeque;
use core::fmt;

use ringfence_types::{Iova, IovaRange, PageSize, RequesterId};

/// Tag of an invalidate request (ITag), 0 to 31.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InvalidationTag(u8);

impl InvalidationTag {
    /// Number of tags: at most 32 requests are outstanding.
    pub const COUNT: usize = 32;

    /// Creates a tag; `None` above 31.
    pub const fn new(raw: u8) -> Option<Self> {
        if raw as usize >= Self::COUNT {
            return None;
        }
        Some(Self(raw))
    }

    /// Returns the number of the tag.
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// An invalidate request, which the unit sends to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InvalidateRequest {
    /// The device whose TLB holds the entries.
    pub device: RequesterId,
    /// The addresses to invalidate: an aligned power of two of pages, as the S field encodes it.
    pub range: IovaRange,
    /// The tag that the completion must carry.
    pub tag: InvalidationTag,
}

/// Limits of the queue of invalidate requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTlbQueueConfig {
    /// Maximum number of requests that wait for a tag.
    pub waiting: usize,
    /// Maximum number of requests outstanding at one device (Invalidate Queue Depth; MIP in the
    /// descriptor).
    pub per_device: usize,
}

impl Default for DeviceTlbQueueConfig {
    fn default() -> Self {
        Self {
            waiting: 256,
            per_device: 32,
        }
    }
}

/// A completion that answers no outstanding request (Invalidation Completion Error, ICE).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionError {
    /// No request with this tag is outstanding.
    UnknownTag(InvalidationTag),
    /// The request with this tag went to another device.
    OtherDevice(RequesterId),
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownTag(tag) => {
                write!(f, "no invalidate request has tag {}", tag.get())
            }
            Self::OtherDevice(device) => write!(f, "the invalidate request went to {device}"),
        }
    }
}

impl core::error::Error for CompletionError {}

#[derive(Debug, Clone, Copy)]
struct Outstanding {
    device: RequesterId,
    ticket: u64,
}

/// Invalidate requests that wait for a tag or for a completion.
#[derive(Debug, Clone)]
pub(super) struct DeviceTlbQueue {
    config: DeviceTlbQueueConfig,
    waiting: VecDeque<(u64, RequesterId, IovaRange)>,
    outstanding: [Option<Outstanding>; InvalidationTag::COUNT],
}

impl DeviceTlbQueue {
    pub(super) const fn new(config: DeviceTlbQueueConfig) -> Self {
        Self {
            config,
            waiting: VecDeque::new(),
            outstanding: [None; InvalidationTag::COUNT],
        }
    }

    /// Returns the number of requests that the queue can still take.
    pub(super) fn room(&self) -> usize {
        self.config.waiting.saturating_sub(self.waiting.len())
    }

    /// Queues a request of `ticket`. The caller has checked [`room`](Self::room).
    pub(super) fn push(&mut self, ticket: u64, device: RequesterId, range: &IovaRange) {
        self.waiting
            .push_back((ticket, device, power_of_two(range)));
    }

    /// Takes the oldest request for a device with room, and gives it a tag.
    pub(super) fn take(&mut self) -> Option<InvalidateRequest> {
        let free = self.outstanding.iter().position(Option::is_none)?;
        let tag = InvalidationTag::new(u8::try_from(free).ok()?)?;
        let next = self
            .waiting
            .iter()
            .position(|(_, device, _)| self.outstanding_at(*device) < self.config.per_device)?;
        let (ticket, device, range) = self.waiting.remove(next)?;
        *self.outstanding.get_mut(free)? = Some(Outstanding { device, ticket });
        Some(InvalidateRequest { device, range, tag })
    }

    fn outstanding_at(&self, device: RequesterId) -> usize {
        let at_device = |o: &&Outstanding| o.device == device;
        self.outstanding.iter().flatten().filter(at_device).count()
    }

    /// Accepts the completion of `device` for `tag`.
    pub(super) fn complete(
        &mut self,
        device: RequesterId,
        tag: InvalidationTag,
    ) -> Result<(), CompletionError> {
        let slot = self.outstanding.get_mut(usize::from(tag.get()));
        let Some((slot, target)) = slot.and_then(|slot| slot.map(|o| (slot, o.device))) else {
            return Err(CompletionError::UnknownTag(tag));
        };
        if target != device {
            return Err(CompletionError::OtherDevice(target));
        }
        *slot = None;
        Ok(())
    }

    /// Returns true if every request of the tickets up to `ticket` has its completion.
    pub(super) fn completed(&self, ticket: u64) -> bool {
        let waiting = self.waiting.iter().map(|(ticket, ..)| *ticket);
        let outstanding = self.outstanding.iter().flatten().map(|o| o.ticket);
        waiting.chain(outstanding).all(|later| later > ticket)
    }

    /// Drops all requests (Invalidation Time-out Error, ITE). Returns the first and the last ticket
    /// that lost a request.
    pub(super) fn abort(&mut self) -> Option<(u64, u64)> {
        let mut lost: Option<(u64, u64)> = None;
        let waiting = self.waiting.drain(..).map(|(ticket, ..)| ticket);
        let outstanding = self.outstanding.iter_mut().filter_map(Option::take);
        for ticket in waiting.chain(outstanding.map(|o| o.ticket)) {
            let (first, last) = lost.unwrap_or((ticket, ticket));
            lost = Some((first.min(ticket), last.max(ticket)));
        }
        lost
    }

    /// Returns the devices that have not completed a request.
    pub(super) fn late(&self) -> impl Iterator<Item = RequesterId> {
        self.outstanding.iter().flatten().map(|o| o.device)
    }
}

/// Returns the smallest aligned power of two of pages that contains `range`.
fn power_of_two(range: &IovaRange) -> IovaRange {
    let (first, last) = (range.start().get(), range.last().get());
    let differing = first ^ last;
    let bits = (u64::BITS - differing.leading_zeros()).max(PageSize::Size4K.shift());
    let mask = match 1_u64.checked_shl(bits) {
        Some(bytes) => bytes.wrapping_sub(1),
        None => u64::MAX,
    };
    IovaRange::inclusive(Iova::new(first & !mask), Iova::new(first | mask))
        .unwrap_or(IovaRange::ALL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_aligned_powers_of_two() {
        for (first, last, expected) in [
            (0x1000, 0x1fff, (0x1000, 0x1fff)),
            (0x1800, 0x1801, (0x1000, 0x1fff)),
            (0x1000, 0x2fff, (0x0, 0x3fff)),
            (0x2000, 0x3fff, (0x2000, 0x3fff)),
            (0x7000, 0x8fff, (0x0, 0xffff)),
            (0, u64::MAX, (0, u64::MAX)),
            (1 << 63, u64::MAX, (1 << 63, u64::MAX)),
            ((1 << 63) - 1, 1 << 63, (0, u64::MAX)),
        ] {
            let range = IovaRange::inclusive(Iova::new(first), Iova::new(last)).unwrap();
            let found = power_of_two(&range);
            assert_eq!(
                (found.start().get(), found.last().get()),
                expected,
                "{first:#x}..={last:#x}"
            );
        }
    }
}
