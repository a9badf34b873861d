//! The receive loop: each buffer of a packet is unmapped and its successor mapped, in the order
//! that the driver has (decision 0011), then the burst is ended and the packets are handed up.

use super::device::QueueDir;
use super::driver::{MAX_BUFFERS, Nic, check, offered, ring};
use super::error::NicError;
use super::layout::{DescriptorSegment, FrameStatus};
use super::profile::Replace;
use crate::ByteMemory;
use crate::api::DmaApi;

/// A transmit interrupt that is taken inside a receive loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preemption {
    /// Before which of the loop's calls to the DMA API, counted from 0; never if the loop makes
    /// fewer.
    pub before_call: u32,
    /// The transmit queue.
    pub queue: u16,
    /// Completions its loop handles at most.
    pub budget: u32,
}

/// What a receive loop did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Received {
    /// Completions handled.
    pub completions: u32,
    /// Frames handed up.
    pub frames: u32,
    /// Whether the preemption took place.
    pub preempted: bool,
}

/// Calls to the DMA API so far, and what happens before one of them.
struct ApiCalls {
    made: u32,
    preemption: Option<Preemption>,
    preempted: bool,
}

impl<H> Nic<H> {
    /// Handles at most `budget` completions of a receive queue as one burst; `each` receives the
    /// frames. The device's tail register is to be written afterwards.
    ///
    /// # Errors
    /// The first error. The burst is ended all the same; packets that were complete are handed up.
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

    /// One completion: whether there was one.
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
                lane: QueueDir::Rx,
                index: queue,
            })?;
        let Some(((claim, status), packet)) = receive.ring.completed(api.memory(), check)? else {
            return Ok(false);
        };
        let bytes = if status == FrameStatus::Done {
            // Checked: the first part is not longer than the whole.
            [claim.first, claim.bytes - claim.first]
        } else {
            self.stats.failed += 1;
            [0; MAX_BUFFERS]
        };
        let buffers = packet.iter().flatten().count();
        let number = self
            .arrivals
            .begin(bytes, [const { None }; MAX_BUFFERS], buffers);
        // Whatever fails for one of them, every buffer of the packet is unmapped: nobody would
        // remember the others.
        let mut result = Ok(());
        for (which, held) in packet.into_iter().enumerate() {
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
                Ok(Some(buffer)) => self.arrivals.buffer_returned(buffer, number, which),
                Ok(None) => self.arrivals.withhold(held.at, number, which),
                Err(error) => {
                    self.arrivals.lose(number);
                    result = result.and(Err(error.into()));
                }
            }
            // A map that stalled before has this place free now.
            if !replaced {
                result = result.and(self.before_call(api, calls));
                if result.is_ok() {
                    result = self.arm(api, queue).map(|_| ());
                }
            }
        }
        result.map(|()| true)
    }

    /// The interrupt comes at any gap between two calls, also between an unmap and the map that
    /// follows it (EIOVAR section 5).
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

    /// Maps the next buffer of the descriptor that is being armed, and posts it when that was the
    /// last one; whether one was mapped.
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
        let which = receive.armed;
        if which < per_packet {
            let Some(buffer) = self.pools.of(which).alloc() else {
                self.stats.starved += 1;
                return Ok(false);
            };
            let bytes = offered(&self.profile, which);
            let ring = ring(QueueDir::Rx, queue);
            let Some((held, segment)) = self.map(api, ring, which, buffer, bytes)? else {
                return Ok(false);
            };
            let Some(receive) = self.receive.get_mut(index) else {
                return Ok(false);
            };
            if let (Some(place), Some(named)) = (
                receive.arming.get_mut(which),
                receive.segments.get_mut(which),
            ) {
                *place = Some(held);
                *named = segment;
            }
            receive.armed = which + 1;
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
    /// The layer's; what was armed stays armed.
    pub fn refill<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
    ) -> Result<(), NicError> {
        while self.arm(api, queue)? {}
        Ok(())
    }

    /// Arms a descriptor of each ring in turns until all are full, or buffers or the layer's
    /// entries run out.
    ///
    /// # Errors
    /// The layer's; what was armed stays armed.
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

    /// Hands up the packets whose buffers are all back; how many frames.
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
                    // Not used, or lost.
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
