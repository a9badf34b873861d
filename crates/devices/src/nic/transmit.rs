//! Sending of frames, and the loop that handles transmit completions.

use super::device::QueueDir;
use super::driver::{MAX_BUFFERS, Nic, Packet, check, ring};
use super::error::NicError;
use super::frame::{FRAME_HEADER_BYTES, MAX_BODY_BYTES};
use super::layout::{DescriptorSegment, FrameStatus};
use crate::ByteMemory;
use crate::api::DmaApi;

/// Result of a send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOutcome {
    /// The device gets the frame with the next doorbell.
    Queued,
    /// The ring is full, or buffers or the layer's entries have run out. Reclaim and try again.
    Full,
}

impl<H> Nic<H> {
    /// Queues `frame` in a transmit ring: copies it into buffers, maps them, and writes the
    /// descriptor.
    ///
    /// # Errors
    /// Nothing was queued and nothing stays mapped.
    pub fn send<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        frame: &[u8],
    ) -> Result<SendOutcome, NicError> {
        let index = usize::from(queue);
        let transmit = self.transmit.get(index).ok_or(NicError::NoSuchQueue {
            dir: QueueDir::Tx,
            index: queue,
        })?;
        if frame.is_empty() || frame.len() > FRAME_HEADER_BYTES + MAX_BODY_BYTES {
            return Err(NicError::FrameLength { bytes: frame.len() });
        }
        if transmit.is_full() {
            self.stats.starved += 1;
            return Ok(SendOutcome::Full);
        }
        let split = if self.profile.buffers_per_packet < MAX_BUFFERS {
            frame.len()
        } else {
            frame.len().min(FRAME_HEADER_BYTES)
        };
        let (first, second) = frame.split_at(split);
        let mut packet: Packet<H> = [const { None }; MAX_BUFFERS];
        let mut segments = [DescriptorSegment::NONE; MAX_BUFFERS];
        for (part_index, part) in [first, second].into_iter().enumerate() {
            if part.is_empty() {
                continue;
            }
            match self.map_packet(api, queue, part_index, part) {
                Ok(Some((held, segment))) => {
                    packet[part_index] = Some(held);
                    segments[part_index] = segment;
                }
                Ok(None) => {
                    return self
                        .undo_maps(api, queue, packet)
                        .map(|()| SendOutcome::Full);
                }
                Err(error) => {
                    self.undo_maps(api, queue, packet)?;
                    return Err(error);
                }
            }
        }
        let raw = segments.map(|segment| DescriptorSegment::encode(&segment));
        let bytes = self.profile.buffers_per_packet * super::SEGMENT_BYTES;
        let raw = raw.as_flattened().get(..bytes).unwrap_or_default();
        let Some(transmit) = self.transmit.get_mut(index) else {
            return Ok(SendOutcome::Full);
        };
        match transmit.post(api.memory(), raw, packet) {
            Ok(()) => Ok(SendOutcome::Queued),
            Err((packet, error)) => {
                self.undo_maps(api, queue, packet)?;
                error.map_or(Ok(SendOutcome::Full), |error| Err(error.into()))
            }
        }
    }

    /// Copies one part of a frame into a buffer and maps it. `None` if not possible now.
    #[inline]
    fn map_packet<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        part_index: usize,
        part: &[u8],
    ) -> Result<Option<(super::driver::PendingDescriptor<H>, DescriptorSegment)>, NicError> {
        let Some(buffer) = self.pools.of(part_index).alloc() else {
            self.stats.starved += 1;
            return Ok(None);
        };
        if let Err(error) = api.memory().write(buffer.start(), part) {
            self.pools.return_buffers(buffer)?;
            return Err(error.into());
        }
        let ring = ring(QueueDir::Tx, queue);
        self.map(api, ring, part_index, buffer, part.len() as u32)
    }

    /// Unmaps the buffers of a frame that is not sent.
    #[cold]
    fn undo_maps<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        packet: Packet<H>,
    ) -> Result<(), NicError> {
        let ring = ring(QueueDir::Tx, queue);
        let released = self.release(api, ring, packet);
        released.and(self.end_burst(api, ring))
    }

    /// Handles at most `budget` completions of a transmit queue as one burst. Returns their number.
    ///
    /// # Errors
    /// Returns the first error. The burst is still ended.
    pub fn reclaim<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
        budget: u32,
    ) -> Result<u32, NicError> {
        let index = usize::from(queue);
        let ring = ring(QueueDir::Tx, queue);
        let mut done = 0;
        let mut result = Ok(());
        while done < budget && result.is_ok() {
            let transmit = self.transmit.get_mut(index).ok_or(NicError::NoSuchQueue {
                dir: QueueDir::Tx,
                index: queue,
            })?;
            match transmit.completed(api.memory(), check) {
                Ok(None) => break,
                Ok(Some(((_, status), packet))) => {
                    done += 1;
                    self.stats.failed += u64::from(status != FrameStatus::Done);
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
