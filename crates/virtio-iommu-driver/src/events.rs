//! The event queue: buffers for fault events, which return to the device once they are read.

use core::sync::atomic::Ordering;

use ringfence_types::{PhysAddr, PhysMemory};
use ringfence_virtio_iommu::spec::{EVENTQ, FAULT_BYTES};

use crate::error::{Failure, UnitError};
use crate::fault::{FAULT_WORDS, Fault, FaultRecord};
use crate::frames::QueueFrames;
use crate::transport::Transport;
use crate::virtqueue::{Buffer, Virtqueue};

/// Most buffers: they share the frame with the ring.
const MOST_BUFFERS: u16 = 64;
const BUFFERS_AT: u64 = 2048;
const BUFFER_BYTES: u64 = 32;

#[derive(Debug)]
pub(crate) struct EventQueue {
    ring: Virtqueue,
    buffers: PhysAddr,
    /// Bit n is set while the device has buffer n.
    offered: u64,
    /// Buffers that the device does not know to have again.
    unpublished: u16,
    is_failed: bool,
}

impl EventQueue {
    pub(crate) fn new(frames: &QueueFrames, size: u16) -> Result<Self, UnitError> {
        let ring = Virtqueue::new(EVENTQ, frames.events, size.min(MOST_BUFFERS));
        Ok(Self {
            ring: ring.ok_or(UnitError::Queue(EVENTQ))?,
            buffers: frames.events.wrapping_add(BUFFERS_AT),
            offered: 0,
            unpublished: 0,
            is_failed: false,
        })
    }

    pub(crate) const fn ring(&self) -> &Virtqueue {
        &self.ring
    }

    /// Empties the queue and offers all buffers.
    pub(crate) fn fill(&mut self, memory: &impl PhysMemory) -> Result<(), Failure> {
        self.ring.clear(memory)?;
        (self.offered, self.unpublished, self.is_failed) = (0, 0, false);
        for index in 0..self.ring.size() {
            self.offer(memory, index)?;
        }
        self.ring.publish(memory)?;
        Ok(())
    }

    fn at(&self, index: u16) -> PhysAddr {
        let offset = u64::from(index).wrapping_mul(BUFFER_BYTES);
        self.buffers.wrapping_add(offset)
    }

    fn offer(&mut self, memory: &impl PhysMemory, index: u16) -> Result<(), Failure> {
        let buffer = Buffer {
            at: self.at(index),
            bytes: FAULT_BYTES as u32,
            is_writable: true,
        };
        self.ring.offer(memory, index, &[buffer])?;
        self.offered |= 1_u64.wrapping_shl(index.into());
        Ok(())
    }

    /// Returns the oldest event, and gives its buffer back to the device. The device gets one
    /// notification when all events are read, or half of the buffers.
    pub(crate) fn next(
        &mut self,
        memory: &impl PhysMemory,
        transport: &mut impl Transport,
        base: u32,
    ) -> Option<FaultRecord> {
        if self.is_failed {
            return None;
        }
        match self.take(memory, transport, base) {
            Ok(found) => found,
            Err(failure) => {
                self.is_failed = true;
                Some(FaultRecord::QueueFailed(failure))
            }
        }
    }

    fn take(
        &mut self,
        memory: &impl PhysMemory,
        transport: &mut impl Transport,
        base: u32,
    ) -> Result<Option<FaultRecord>, Failure> {
        let in_flight = self.offered.count_ones() as u16;
        let next = self.ring.next_used(memory, in_flight)?;
        let is_due = next.is_none() || self.unpublished >= self.ring.size() / 2;
        if is_due && self.ring.publish(memory)? {
            self.unpublished = 0;
            transport.notify(self.ring.number());
        }
        let Some(used) = next else {
            return Ok(None);
        };
        let bit = 1_u64.checked_shl(used.head).unwrap_or(0);
        if self.offered & bit == 0 {
            return Err(Failure::UsedId(used.head));
        }
        if used.bytes > FAULT_BYTES as u32 {
            return Err(Failure::UsedLength(used.bytes));
        }
        let index = used.head as u16;
        let mut raw = [0; FAULT_WORDS];
        let words = memory.words(self.at(index), FAULT_WORDS)?;
        for (value, word) in raw.iter_mut().zip(words) {
            *value = word.load(Ordering::Acquire);
            word.store(0, Ordering::Relaxed);
        }
        self.offered &= !bit;
        self.offer(memory, index)?;
        self.unpublished = self.unpublished.wrapping_add(1);
        let bytes = used.bytes;
        Ok(Some(if bytes == FAULT_BYTES as u32 {
            FaultRecord::Fault(Fault::decode(raw, base))
        } else {
            FaultRecord::Malformed { bytes, raw }
        }))
    }
}
