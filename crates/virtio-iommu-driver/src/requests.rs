//! The request queue: requests in flight, their answers, and unmaps that the device refused.

use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use ringfence_types::{
    DomainId, Invalidation, InvalidationError, MemoryError, PhysAddr, PhysMemory, Ticket,
};
use ringfence_virtio_iommu::spec::{PROBE_BYTES, REQUESTQ, TAIL_BYTES, VIRTIO_IOMMU_S_IOERR};

use crate::error::{Failure, Status, UnitError};
use crate::frames::QueueFrames;
use crate::request::Request;
use crate::transport::{
    ABSENT, ACKNOWLEDGE, DEVICE_NEEDS_RESET, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, Transport,
};
use crate::unmap_of::UnmapOf;
use crate::virtqueue::{Buffer, Used, Virtqueue};

/// Bytes of a slot's buffer, and offset of the tail in it.
const SLOT_BYTES: u64 = 64;
const TAIL_AT: u64 = 40;
/// Offset of the properties in the frame for PROBE.
pub(crate) const PROPERTIES_AT: u64 = (PROBE_BYTES as u64).next_multiple_of(64);
/// Polls between two looks at the device status.
const LOOKS: u32 = 256;
/// Status of a working device.
const WORKING: u8 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;

/// Checks the status of a device that was started.
pub(crate) fn check_status(status: u8) -> Result<(), Failure> {
    match status {
        // It has all bits.
        ABSENT => Err(Failure::Status(status)),
        _ if status & DEVICE_NEEDS_RESET != 0 => Err(Failure::NeedsReset),
        _ if status & FAILED != 0 || status & WORKING != WORKING => Err(Failure::Status(status)),
        _ => Ok(()),
    }
}

/// The receiver of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// A caller that waits for the slot.
    Caller,
    /// Invalidations that wait for the sequence number.
    Invalidations(UnmapOf),
}

#[derive(Debug, Clone, Copy)]
struct InFlight {
    sequence: u64,
    /// Sequence number of the first attempt: tickets from there on wait for the answer.
    owed_since: u64,
    /// The writable part, and the number of its bytes.
    reply: PhysAddr,
    room: u32,
    receiver: Receiver,
}

#[derive(Debug, Clone, Copy)]
enum Slot {
    Free,
    InFlight(InFlight),
    Answered(Result<(), Status>),
}

/// An UNMAP that the device refused: endpoints may still reach the pages.
#[derive(Debug, Clone, Copy)]
struct RefusedUnmap {
    owed_since: u64,
    pages: UnmapOf,
}

/// The request queue. Slot n has the descriptors 2n and 2n + 1 and a buffer of its own.
#[derive(Debug)]
pub(crate) struct RequestQueue {
    ring: Virtqueue,
    buffers: PhysAddr,
    probe: Option<PhysAddr>,
    probe_bytes: u32,
    slots: Vec<Slot>,
    /// Number of slots in flight.
    in_flight: u16,
    /// Sequence number of the last request.
    submitted: u64,
    /// Sequence number of the last request that the device knows.
    published: u64,
    /// Polls since the last answer.
    polls: u32,
    poll_limit: u32,
    refused: Vec<RefusedUnmap>,
    failure: Option<Failure>,
}

impl RequestQueue {
    pub(crate) fn new(
        frames: &QueueFrames,
        size: u16,
        probe_bytes: u32,
        poll_limit: u32,
    ) -> Result<Self, UnitError> {
        let ring = Virtqueue::new(REQUESTQ, frames.requests, size);
        let ring = ring.filter(|ring| ring.size() >= 2);
        let ring = ring.ok_or(UnitError::Queue(REQUESTQ))?;
        let slots = usize::from(ring.size() / 2);
        Ok(Self {
            ring,
            buffers: frames.buffers,
            probe: frames.probe,
            probe_bytes,
            slots: alloc::vec![Slot::Free; slots],
            in_flight: 0,
            submitted: 0,
            published: 0,
            polls: 0,
            poll_limit,
            refused: Vec::new(),
            failure: None,
        })
    }

    pub(crate) const fn ring(&self) -> &Virtqueue {
        &self.ring
    }

    /// Forgets all requests: the device was reset, and has no domain any more.
    pub(crate) fn clear(&mut self, memory: &impl PhysMemory) -> Result<(), Failure> {
        self.ring.clear(memory)?;
        self.slots.fill(Slot::Free);
        self.refused.clear();
        (self.in_flight, self.polls, self.failure) = (0, 0, None);
        self.published = self.submitted;
        Ok(())
    }

    pub(crate) const fn check(&self) -> Result<(), Failure> {
        match self.failure {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    /// Stops the queue until a reset.
    pub(crate) const fn fail(&mut self, failure: Failure) -> Failure {
        self.failure = Some(failure);
        failure
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Returns the sequence number of the last request.
    pub(crate) const fn submitted(&self) -> u64 {
        self.submitted
    }

    pub(crate) fn free_slots(&self) -> usize {
        let free = |slot: &&Slot| matches!(slot, Slot::Free);
        self.slots.iter().filter(free).count()
    }

    /// Returns true if an UNMAP of some of these pages is not answered with success.
    pub(crate) fn is_unmapping(&self, pages: &UnmapOf) -> bool {
        let overlaps =
            |other: &UnmapOf| other.domain == pages.domain && other.range.overlaps(&pages.range);
        self.slots.iter().any(|slot| match slot {
            Slot::InFlight(InFlight {
                receiver: Receiver::Invalidations(other),
                ..
            }) => overlaps(other),
            _ => false,
        }) || self.refused.iter().any(|refused| overlaps(&refused.pages))
    }

    /// Writes a request that the device does not see before [`kick`](Self::kick).
    ///
    /// # Errors
    /// [`UnitError::QueueFull`]: nothing changed.
    pub(crate) fn queue(
        &mut self,
        memory: &impl PhysMemory,
        request: &Request,
        receiver: Receiver,
    ) -> Result<usize, UnitError> {
        self.check()?;
        let free = |slot: &Slot| matches!(slot, Slot::Free);
        let index = self.slots.iter().position(free);
        let index = index.ok_or(UnitError::QueueFull)?;
        let written = self.write(memory, index, request);
        let (reply, room) = written.map_err(|_| self.fail(Failure::Memory))?;
        self.submitted = self.submitted.wrapping_add(1);
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Slot::InFlight(InFlight {
                sequence: self.submitted,
                owed_since: self.submitted,
                reply,
                room,
                receiver,
            });
        }
        self.in_flight = self.in_flight.wrapping_add(1);
        Ok(index)
    }

    /// Writes the buffers and the chain of a request. Returns the writable part.
    fn write(
        &mut self,
        memory: &impl PhysMemory,
        index: usize,
        request: &Request,
    ) -> Result<(PhysAddr, u32), MemoryError> {
        let (at, reply, room) = match (request, self.probe) {
            (Request::Probe { .. }, Some(frame)) => {
                let room = self.probe_bytes.saturating_add(TAIL_BYTES as u32);
                (frame, frame.wrapping_add(PROPERTIES_AT), room)
            }
            _ => {
                let offset = (index as u64).wrapping_mul(SLOT_BYTES);
                let at = self.buffers.wrapping_add(offset);
                (at, at.wrapping_add(TAIL_AT), TAIL_BYTES as u32)
            }
        };
        let (words, bytes) = request.words();
        let count = bytes.div_ceil(8);
        for (word, value) in memory.words(at, count)?.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        for word in memory.words(reply, room.div_ceil(8) as usize)? {
            word.store(0, Ordering::Relaxed);
        }
        // A tail that the device does not write is no success.
        let (word, shift) = tail_of(memory, reply, room)?;
        word.fetch_or(
            u64::from(VIRTIO_IOMMU_S_IOERR).wrapping_shl(shift),
            Ordering::Relaxed,
        );
        let buffers = [
            Buffer {
                at,
                bytes: bytes as u32,
                is_writable: false,
            },
            Buffer {
                at: reply,
                bytes: room,
                is_writable: true,
            },
        ];
        let head = (index as u16).wrapping_mul(2);
        self.ring.offer(memory, head, &buffers)?;
        Ok((reply, room))
    }

    /// Shows the device all queued requests, with one notification.
    pub(crate) fn kick(
        &mut self,
        memory: &impl PhysMemory,
        transport: &mut impl Transport,
    ) -> Result<(), Failure> {
        self.check()?;
        let published = self.ring.publish(memory);
        if published.map_err(|error| self.fail(error.into()))? {
            self.published = self.submitted;
            self.polls = 0;
            transport.notify(self.ring.number());
        }
        Ok(())
    }

    /// Takes the answers that have arrived.
    fn collect(&mut self, memory: &impl PhysMemory) -> Result<(), Failure> {
        self.check()?;
        loop {
            let next = self.ring.next_used(memory, self.in_flight);
            let answered = match next {
                Ok(None) => return Ok(()),
                Ok(Some(used)) => self.answer(memory, used),
                Err(failure) => Err(failure),
            };
            answered.map_err(|failure| self.fail(failure))?;
        }
    }

    fn answer(&mut self, memory: &impl PhysMemory, used: Used) -> Result<(), Failure> {
        let is_head = used.head.is_multiple_of(2);
        let slot = self.slots.get_mut((used.head / 2) as usize);
        let Some(slot) = slot.filter(|_| is_head) else {
            return Err(Failure::UsedId(used.head));
        };
        let Slot::InFlight(request) = *slot else {
            return Err(Failure::UsedId(used.head));
        };
        if request.sequence > self.published {
            return Err(Failure::UsedId(used.head));
        }
        if used.bytes > request.room {
            return Err(Failure::UsedLength(used.bytes));
        }
        let result = if used.bytes > request.room.saturating_sub(TAIL_BYTES as u32) {
            let (word, shift) = tail_of(memory, request.reply, request.room)?;
            Status::decode(word.load(Ordering::Acquire).wrapping_shr(shift) as u8)
        } else {
            Err(Status::IoErr)
        };
        *slot = match request.receiver {
            Receiver::Caller => Slot::Answered(result),
            Receiver::Invalidations(_) => Slot::Free,
        };
        self.in_flight = self.in_flight.wrapping_sub(1);
        self.polls = 0;
        if let (Receiver::Invalidations(pages), Err(_)) = (request.receiver, result) {
            // An empty queue must hold all repetitions.
            if self.refused.len() >= self.slots.len() {
                return Err(Failure::Refusals);
            }
            self.refused.push(RefusedUnmap {
                owed_since: request.owed_since,
                pages,
            });
        }
        Ok(())
    }

    /// Waits for the answer of the caller's `slot`, and frees it.
    ///
    /// # Errors
    /// The device answered with another status than OK, or fails. A time-out stops the queue,
    /// because the device may still execute the request.
    pub(crate) fn wait(
        &mut self,
        memory: &impl PhysMemory,
        transport: &impl Transport,
        slot: usize,
    ) -> Result<Result<(), Status>, Failure> {
        self.wait_until(memory, transport, |queue| {
            let slot = queue.slots.get_mut(slot)?;
            let Slot::Answered(result) = *slot else {
                return None;
            };
            *slot = Slot::Free;
            Some(result)
        })
    }

    /// Collects answers until `done` returns a value.
    pub(crate) fn wait_until<T>(
        &mut self,
        memory: &impl PhysMemory,
        transport: &impl Transport,
        mut done: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, Failure> {
        loop {
            self.collect(memory)?;
            if let Some(value) = done(self) {
                return Ok(value);
            }
            if self.count_poll(transport)? {
                return Err(self.fail(Failure::TimedOut));
            }
            core::hint::spin_loop();
        }
    }

    /// Counts a poll without progress, and looks at the device status now and then. Returns true
    /// beyond the limit.
    fn count_poll(&mut self, transport: &impl Transport) -> Result<bool, Failure> {
        self.polls = self.polls.saturating_add(1);
        let is_beyond = self.polls > self.poll_limit;
        if is_beyond || self.polls.is_multiple_of(LOOKS) {
            check_status(transport.status()).map_err(|broken| self.fail(broken))?;
        }
        Ok(is_beyond)
    }

    /// Returns true if all requests up to `ticket` are answered.
    pub(crate) fn poll(
        &mut self,
        memory: &impl PhysMemory,
        transport: &impl Transport,
        ticket: Ticket,
    ) -> Result<bool, InvalidationError> {
        if ticket.get() > self.submitted {
            return Err(InvalidationError::Failed);
        }
        self.collect(memory)?;
        let is_awaited = |slot: &Slot| match slot {
            Slot::InFlight(request) => request.owed_since <= ticket.get(),
            Slot::Free | Slot::Answered(_) => false,
        };
        if self.slots.iter().any(is_awaited) {
            return match self.count_poll(transport)? {
                true => Err(InvalidationError::TimedOut),
                false => Ok(false),
            };
        }
        // Endpoints may still reach the pages of a refused unmap.
        if self
            .refused
            .iter()
            .any(|refused| refused.owed_since <= ticket.get())
        {
            return Err(InvalidationError::Failed);
        }
        Ok(true)
    }

    /// Queues the refused unmaps again that `requests` name.
    pub(crate) fn repeat_refused(
        &mut self,
        memory: &impl PhysMemory,
        requests: &[Invalidation],
    ) -> Result<(), InvalidationError> {
        let is_named =
            |refused: &RefusedUnmap| requests.iter().any(|r| refused.pages.is_named_by(r));
        let count = self.refused.iter().filter(|r| is_named(r)).count();
        if count == 0 {
            return Ok(());
        }
        if count > self.free_slots() {
            return Err(InvalidationError::QueueFull);
        }
        while let Some(index) = self.refused.iter().position(is_named) {
            let RefusedUnmap { owed_since, pages } = self.refused.swap_remove(index);
            let queued = self.queue(memory, &pages.request(), Receiver::Invalidations(pages));
            let slot = queued.map_err(|_| InvalidationError::Failed)?;
            if let Some(Slot::InFlight(request)) = self.slots.get_mut(slot) {
                request.owed_since = owed_since;
            }
        }
        Ok(())
    }

    /// Returns the bytes of the properties in the last reply to PROBE.
    pub(crate) fn properties(
        &self,
        memory: &impl PhysMemory,
        bytes: u32,
    ) -> Result<Vec<u8>, MemoryError> {
        let Some(frame) = self.probe else {
            return Ok(Vec::new());
        };
        let count = bytes.div_ceil(8) as usize;
        let words = memory.words(frame.wrapping_add(PROPERTIES_AT), count)?;
        let loaded = words.iter().map(|word| word.load(Ordering::Acquire));
        let mut found: Vec<u8> = loaded.flat_map(u64::to_le_bytes).collect();
        found.truncate(bytes as usize);
        Ok(found)
    }

    /// Forgets the refused unmaps of a domain that ceased to exist.
    pub(crate) fn forget_refused(&mut self, domain: DomainId) {
        self.refused
            .retain(|refused| refused.pages.domain != domain);
    }
}

/// Returns the word with the status of a reply, and the status' shift in it.
fn tail_of(
    memory: &impl PhysMemory,
    reply: PhysAddr,
    room: u32,
) -> Result<(&core::sync::atomic::AtomicU64, u32), MemoryError> {
    let offset = u64::from(room).saturating_sub(TAIL_BYTES as u64);
    let at = reply.wrapping_add(offset);
    let shift = at.offset_in(8).wrapping_mul(8) as u32;
    Ok((memory.word(at.align_down(8))?, shift))
}
