//! Sending of frames, and the loop that handles transmit completions.

use super::device::QueueDir;
use super::driver::{MAX_BUFFERS, Nic, Packet, ring};
use super::error::NicError;
use super::frame::{FRAME_HEADER_BYTES, MAX_BODY_BYTES};
use super::layout::{DESCRIPTOR_BYTES, DescriptorSegment, FrameStatus, SEGMENT_BYTES};
use super::profile::TxReclaim;
use super::tx_ring::TxInfo;
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
    /// descriptor. A frame within the profile's `inline_thold` is copied into the descriptor, and
    /// nothing is mapped.
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
        if transmit.ring.is_full() {
            self.stats.starved += 1;
            return Ok(SendOutcome::Full);
        }
        if frame.len() <= self.profile.inline_at_most() {
            return self.send_inline(api, index, frame);
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
        match transmit
            .ring
            .post(api.memory(), raw, TxInfo::Mapped(packet))
        {
            Ok(()) => {
                transmit.unsynced = true;
                Ok(SendOutcome::Queued)
            }
            Err((info, error)) => {
                if let TxInfo::Mapped(packet) = info {
                    self.undo_maps(api, queue, packet)?;
                }
                error.map_or(Ok(SendOutcome::Full), |error| Err(error.into()))
            }
        }
    }

    /// Copies a frame of at most [`NicProfile::inline_at_most`](super::NicProfile::inline_at_most)
    /// bytes into the next descriptor of a ring that is not full (`build_inline_wqe`).
    fn send_inline<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        index: usize,
        frame: &[u8],
    ) -> Result<SendOutcome, NicError> {
        let mut raw = [0; DESCRIPTOR_BYTES];
        let bytes = frame.len() as u32;
        let (segment, data) = raw.split_at_mut(SEGMENT_BYTES);
        segment.copy_from_slice(&DescriptorSegment::inline(bytes).encode());
        let (Some(room), Some(transmit)) =
            (data.get_mut(..frame.len()), self.transmit.get_mut(index))
        else {
            return Err(NicError::FrameLength { bytes: frame.len() });
        };
        room.copy_from_slice(frame);
        match transmit
            .ring
            .post(api.memory(), &raw, TxInfo::Inline { bytes })
        {
            Ok(()) => {
                self.stats.inlined += 1;
                Ok(SendOutcome::Queued)
            }
            Err((_, error)) => error.map_or(Ok(SendOutcome::Full), |error| Err(error.into())),
        }
    }

    /// Counts a sent frame after its doorbell. If the profile polls and a poll is due, handles all
    /// completions of the queue as one burst. Returns their number.
    ///
    /// # Errors
    /// See [`reclaim`](Self::reclaim).
    pub fn xmit_poll<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        queue: u16,
    ) -> Result<u32, NicError> {
        let TxReclaim::Poll { moder, .. } = self.profile.tx_reclaim else {
            return Ok(0);
        };
        let transmit = self.transmit.get_mut(usize::from(queue));
        match transmit.is_some_and(|transmit| transmit.poll_due(moder)) {
            true => self.reclaim(api, queue, u32::MAX),
            false => Ok(0),
        }
    }

    /// Returns the number of sent frames of a queue whose completion was not handled.
    pub fn in_flight(&self, queue: u16) -> u32 {
        let transmit = self.transmit.get(usize::from(queue));
        transmit.map_or(0, |transmit| transmit.ring.outstanding())
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
    /// The call ends no burst if it unmapped no frame.
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
        let mut unmapped = false;
        let mut result = Ok(());
        while done < budget && result.is_ok() {
            let transmit = self.transmit.get_mut(index).ok_or(NicError::NoSuchQueue {
                dir: QueueDir::Tx,
                index: queue,
            })?;
            match transmit.ring.completed(api.memory(), TxInfo::check) {
                Ok(None) => break,
                Ok(Some(((_, status), info))) => {
                    done += 1;
                    self.stats.failed += u64::from(status != FrameStatus::Done);
                    if let TxInfo::Mapped(packet) = info {
                        unmapped = true;
                        result = self.release(api, ring, packet);
                    }
                }
                Err(error) => result = Err(error.into()),
            }
        }
        if unmapped {
            result = result.and(self.end_burst(api, ring));
        }
        result.map(|()| done)
    }
}
