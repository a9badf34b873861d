//! The receive loop. It unmaps each buffer of a packet and maps its replacement, in the profile's
//! order (decision 0011). Then it ends the burst and delivers the packets.

use super::device::QueueDir;
use super::driver::{MAX_BUFFERS, Nic, check, lengths, offered, ring};
use super::error::NicError;
use super::layout::{DescriptorSegment, FrameStatus};
use super::profile::Replace;
use crate::ByteMemory;
use crate::api::DmaApi;

/// A transmit interrupt during a receive loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preemption {
    /// Number of the loop's DMA API call before which it occurs, counted from 0. It does not occur
    /// if the loop makes fewer calls.
    pub before_call: u32,
    /// Index of the transmit queue that interrupts.
    pub queue: u16,
    /// Maximum number of completions that its loop handles.
    pub budget: u32,
}

/// Result of a receive loop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Received {
    /// Number of completions handled, at most the budget.
    pub completions: u32,
    /// Number of frames delivered to the caller.
    pub frames: u32,
    /// True if the preemption took place.
    pub preempted: bool,
}

/// Number of DMA API calls so far, and the pending preemption.
struct ApiCalls {
    made: u32,
    preemption: Option<Preemption>,
    preempted: bool,
}

impl<H> Nic<H> {
    /// Handles at most `budget` completions of a receive queue as one burst, and passes the frames
    /// to `each`. The caller must write the device's tail register afterwards.
    ///
    /// # Errors
    /// Returns the first error. The burst is still ended, and complete packets are delivered.
    pub fn receive<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        budget: u32,
        preemption: Option<Preemption>,
        each: impl FnMut(&[u8]),
    ) -> Result<Received, NicError> {
        let mut calls = ApiCalls {
            made: 0,
            preemption,
            preempted: false,
        };
        let mut completions = 0;
        let mut result = Ok(());
        while completions < budget {
            match self.receive_one(api, queue, &mut calls) {
                Ok(true) => completions += 1,
                Ok(false) => break,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        if completions > 0 || result.is_err() {
            result = result.and(self.end_burst(api, ring(QueueDir::Rx, queue)));
        }
        let delivered = self.deliver(api, each);
        result = result.and(delivered.map(|_| ()));
        result.and_then(|()| self.refill(api, queue))?;
        Ok(Received {
            completions,
            frames: delivered?,
            preempted: calls.preempted,
        })
    }

    /// Handles one completion; false if there is none.
    #[inline]
    fn receive_one<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        calls: &mut ApiCalls,
    ) -> Result<bool, NicError> {
        let receive = self
            .receive
            .get_mut(usize::from(queue))
            .ok_or(NicError::NoSuchQueue {
                dir: QueueDir::Rx,
                index: queue,
            })?;
        let check = |raw: &_, head, packet: &_| check(raw, head, lengths(packet));
        let Some(((claim, status), packet)) = receive.ring.completed(api.memory(), check)? else {
            return Ok(false);
        };
        let bytes = if status == FrameStatus::Done {
            // `check` ensures that the first part is not longer than the whole.
            [claim.first, claim.bytes - claim.first]
        } else {
            self.stats.failed += 1;
            [0; MAX_BUFFERS]
        };
        let buffers = packet.iter().flatten().count();
        let number = self
            .arrivals
            .begin(bytes, [const { None }; MAX_BUFFERS], buffers);
        // Unmap every buffer of the packet even after an error, because no record of the others
        // remains.
        let mut result = Ok(());
        for (part_index, held) in packet.into_iter().enumerate() {
            let Some(held) = held else { continue };
            let mut replaced = false;
            if self.profile.replace == Replace::BeforeUnmap && result.is_ok() {
                result = self.before_call(api, calls);
                if result.is_ok() {
                    result = self.arm(api, queue).map(|armed| replaced = armed);
                }
            }
            result = result.and(self.before_call(api, calls));
            self.stats.unmaps += 1;
            match api.unmap(ring(QueueDir::Rx, queue), held.handle) {
                Ok(Some(buffer)) => self.arrivals.buffer_returned(buffer, number, part_index),
                Ok(None) => self.arrivals.withhold(held.at, number, part_index),
                Err(error) => {
                    self.arrivals.lose(number);
                    result = result.and(Err(error.into()));
                }
            }
            // A map that stalled before can use the freed entry.
            if !replaced {
                result = result.and(self.before_call(api, calls));
                if result.is_ok() {
                    result = self.arm(api, queue).map(|_| ());
                }
            }
        }
        result.map(|()| true)
    }

    /// Takes a pending interrupt. It may occur between any two calls, also between an unmap and the
    /// next map (EIOVAR section 5).
    #[inline]
    fn before_call<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        calls: &mut ApiCalls,
    ) -> Result<(), NicError> {
        let now = calls
            .preemption
            .take_if(|preemption| preemption.before_call == calls.made);
        calls.made += 1;
        if let Some(preemption) = now {
            calls.preempted = true;
            self.reclaim(api, preemption.queue, preemption.budget)?;
        }
        Ok(())
    }

    /// Maps the next buffer of the descriptor being armed, and posts the descriptor after its last
    /// buffer. Returns true if a buffer was mapped.
    #[inline]
    fn arm<A: DmaApi<Handle = H>>(&mut self, api: &mut A, queue: u16) -> Result<bool, NicError> {
        let index = usize::from(queue);
        let per_packet = self.profile.buffers_per_packet;
        let Some(receive) = self.receive.get(index) else {
            return Ok(false);
        };
        if receive.ring.is_full() {
            return Ok(false);
        }
        let part_index = receive.armed;
        if part_index < per_packet {
            let Some(buffer) = self.pools.of(part_index).alloc() else {
                self.stats.starved += 1;
                return Ok(false);
            };
            let bytes = offered(&self.profile, part_index);
            let ring = ring(QueueDir::Rx, queue);
            let Some((held, segment)) = self.map(api, ring, part_index, buffer, bytes)? else {
                return Ok(false);
            };
            let Some(receive) = self.receive.get_mut(index) else {
                return Ok(false);
            };
            if let (Some(slot), Some(named)) = (
                receive.arming.get_mut(part_index),
                receive.segments.get_mut(part_index),
            ) {
                *slot = Some(held);
                *named = segment;
            }
            receive.armed = part_index + 1;
        }
        let Some(receive) = self.receive.get_mut(index) else {
            return Ok(false);
        };
        if receive.armed == per_packet {
            let raw = receive
                .segments
                .map(|segment| DescriptorSegment::encode(&segment));
            let bytes = per_packet * super::SEGMENT_BYTES;
            let raw = raw.as_flattened().get(..bytes).unwrap_or_default();
            let packet = core::mem::replace(&mut receive.arming, [const { None }; MAX_BUFFERS]);
            match receive.ring.post(api.memory(), raw, packet) {
                Ok(()) => receive.armed = 0,
                Err((packet, error)) => {
                    receive.arming = packet;
                    return error.map_or(Ok(false), |error| Err(error.into()));
                }
            }
        }
        Ok(true)
    }

    /// Arms descriptors until the ring is full, or buffers or the layer's entries run out.
    ///
    /// # Errors
    /// Returns the layer's error; armed descriptors stay armed.
    pub fn refill<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
    ) -> Result<(), NicError> {
        while self.arm(api, queue)? {}
        Ok(())
    }

    /// Arms a descriptor of each ring in turn until all are full, or buffers or the layer's entries
    /// run out.
    ///
    /// # Errors
    /// Returns the layer's error; armed descriptors stay armed.
    pub(super) fn fill_in_turns<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
    ) -> Result<(), NicError> {
        let mut armed = true;
        while core::mem::take(&mut armed) {
            for queue in 0..self.profile.receive.count {
                for _ in 0..self.profile.buffers_per_packet {
                    armed |= self.arm(api, queue)?;
                }
            }
        }
        Ok(())
    }

    /// Delivers the packets whose buffers are all returned. Returns the number of frames.
    fn deliver<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        mut each: impl FnMut(&[u8]),
    ) -> Result<u32, NicError> {
        let mut frames = 0;
        let mut result = Ok(());
        while let Some((bytes, buffers)) = self.arrivals.next() {
            self.scratch.clear();
            let mut whole = true;
            for (buffer, bytes) in buffers.into_iter().zip(bytes) {
                let Some(buffer) = buffer else {
                    // Unused or lost.
                    whole &= bytes == 0;
                    continue;
                };
                let start = self.scratch.len();
                self.scratch.resize(start + bytes as usize, 0);
                let read = api
                    .memory()
                    .read(buffer.start(), &mut self.scratch[start..]);
                result = result
                    .and(read.map_err(NicError::from))
                    .and(self.pools.return_buffers(buffer));
            }
            if whole && !self.scratch.is_empty() && result.is_ok() {
                each(&self.scratch);
                frames += 1;
            }
        }
        result.map(|()| frames)
    }
}
