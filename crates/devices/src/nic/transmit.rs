//! Sending, and the loop that takes back what was sent.

use super::device::Lane;
use super::driver::{MAX_BUFFERS, Nic, Packet, check, ring};
use super::error::NicError;
use super::frame::{FRAME_HEADER_BYTES, MAX_BODY_BYTES};
use super::layout::{Segment, Status};
use crate::ByteMemory;
use crate::api::DmaApi;

/// What became of a frame to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// The device has it after the next doorbell.
    Queued,
    /// The ring is full, or buffers or the layer's entries have run out: reclaim, and try again.
    Full,
}

impl<H> Nic<H> {
    /// Puts `frame` into a transmit ring: copies it into buffers, maps them, writes the descriptor.
    ///
    /// # Errors
    /// Nothing was queued and nothing stays mapped.
    pub fn send<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        frame: &[u8],
    ) -> Result<Sent, NicError> {
        let index = usize::from(queue);
        let transmit = self.transmit.get(index).ok_or(NicError::NoSuchQueue {
            lane: Lane::Transmit,
            index: queue,
        })?;
        if frame.is_empty() || frame.len() > FRAME_HEADER_BYTES + MAX_BODY_BYTES {
            return Err(NicError::FrameLength { bytes: frame.len() });
        }
        if transmit.is_full() {
            self.stats.starved += 1;
            return Ok(Sent::Full);
        }
        let split = if self.profile.buffers_per_packet < MAX_BUFFERS {
            frame.len()
        } else {
            frame.len().min(FRAME_HEADER_BYTES)
        };
        let (first, second) = frame.split_at(split);
        let mut packet: Packet<H> = [const { None }; MAX_BUFFERS];
        let mut segments = [Segment::NONE; MAX_BUFFERS];
        for (which, part) in [first, second].into_iter().enumerate() {
            if part.is_empty() {
                continue;
            }
            match self.place(api, queue, which, part) {
                Ok(Some((held, segment))) => {
                    packet[which] = Some(held);
                    segments[which] = segment;
                }
                Ok(None) => return self.take_back(api, queue, packet).map(|()| Sent::Full),
                Err(error) => {
                    self.take_back(api, queue, packet)?;
                    return Err(error);
                }
            }
        }
        let raw = segments.map(|segment| Segment::encode(&segment));
        let bytes = self.profile.buffers_per_packet * super::SEGMENT_BYTES;
        let raw = raw.as_flattened().get(..bytes).unwrap_or_default();
        let Some(transmit) = self.transmit.get_mut(index) else {
            return Ok(Sent::Full);
        };
        match transmit.post(api.memory(), raw, packet) {
            Ok(()) => Ok(Sent::Queued),
            Err((packet, error)) => {
                self.take_back(api, queue, packet)?;
                error.map_or(Ok(Sent::Full), |error| Err(error.into()))
            }
        }
    }

    /// One part of a frame into one mapped buffer. `None`: not now.
    #[inline]
    fn place<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        which: usize,
        part: &[u8],
    ) -> Result<Option<(super::driver::Held<H>, Segment)>, NicError> {
        let Some(buffer) = self.pools.of(which).take() else {
            self.stats.starved += 1;
            return Ok(None);
        };
        if let Err(error) = api.memory().write(buffer.start(), part) {
            self.pools.give(buffer)?;
            return Err(error.into());
        }
        let ring = ring(Lane::Transmit, queue);
        self.map(api, ring, which, buffer, part.len() as u32)
    }

    /// Undoes the maps of a frame that is not sent.
    #[cold]
    fn take_back<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        packet: Packet<H>,
    ) -> Result<(), NicError> {
        let ring = ring(Lane::Transmit, queue);
        let released = self.release(api, ring, packet);
        released.and(self.end_burst(api, ring))
    }

    /// Handles at most `budget` completions of a transmit queue as one burst; how many.
    ///
    /// # Errors
    /// The first error. The burst is ended all the same.
    pub fn reclaim<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        budget: u32,
    ) -> Result<u32, NicError> {
        let index = usize::from(queue);
        let ring = ring(Lane::Transmit, queue);
        let mut done = 0;
        let mut result = Ok(());
        while done < budget && result.is_ok() {
            let transmit = self.transmit.get_mut(index).ok_or(NicError::NoSuchQueue {
                lane: Lane::Transmit,
                index: queue,
            })?;
            match transmit.completed(api.memory(), check) {
                Ok(None) => break,
                Ok(Some(((_, status), packet))) => {
                    done += 1;
                    self.stats.failed += u64::from(status != Status::Done);
                    result = self.release(api, ring, packet);
                }
                Err(error) => result = Err(error.into()),
            }
        }
        if done > 0 || result.is_err() {
            result = result.and(self.end_burst(api, ring));
        }
        result.map(|()| done)
    }
}
