//! The invalidation queue of a VT-d unit in a guest's memory. The guest writes descriptors, and the
//! host reads them when the guest writes the tail register.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_hw::InvalidationDescriptor;
use ringfence_memory::{Arena, Frames};
use ringfence_types::{FrameSource, InvalidationError, PhysAddr, PhysMemory, Ticket};

use crate::error::LabError;

/// Descriptors in the queue: one page.
const ENTRIES: u64 = 256;
const DESCRIPTOR_BYTES: u64 = 16;

/// The queue, with the positions of both sides.
#[derive(Debug)]
pub(super) struct GuestQueue {
    base: PhysAddr,
    status: PhysAddr,
    /// Position of the next descriptor that the guest writes.
    tail: u64,
    /// Position of the next descriptor that the host reads.
    head: u64,
    /// Value of the last wait descriptor.
    sequence: u32,
}

impl GuestQueue {
    /// Creates an empty queue.
    ///
    /// # Errors
    /// Memory is short.
    pub(super) fn new(frames: &Frames<Rc<Arena>>) -> Result<Self, LabError> {
        let frame = || {
            let frame = frames.alloc_zeroed();
            frame.map_err(|_| LabError::Internal("no frame for the queue"))
        };
        Ok(Self {
            base: frame()?,
            status: frame()?,
            tail: 0,
            head: 0,
            sequence: 0,
        })
    }

    /// Writes `descriptor` and a wait descriptor. The ticket is complete when the host has written
    /// the status.
    ///
    /// # Errors
    /// The queue lies outside memory.
    pub(super) fn submit(
        &mut self,
        memory: &Arena,
        descriptor: InvalidationDescriptor,
    ) -> Result<Ticket, InvalidationError> {
        self.sequence = self.sequence.wrapping_add(1);
        let (status, data) = (self.status, self.sequence);
        self.push(memory, descriptor.encode())?;
        self.push(
            memory,
            InvalidationDescriptor::Wait { status, data }.encode(),
        )?;
        Ok(Ticket::new(data.into()))
    }

    /// Writes the words of one descriptor.
    ///
    /// # Errors
    /// The queue lies outside memory.
    pub(super) fn push(
        &mut self,
        memory: &Arena,
        [low, high]: [u64; 2],
    ) -> Result<(), InvalidationError> {
        let at = self.base;
        let at = at.wrapping_add(self.tail % ENTRIES * DESCRIPTOR_BYTES);
        let words = memory.words(at, 2);
        let [first, second] = words.map_err(|_| InvalidationError::Failed)? else {
            return Err(InvalidationError::Failed);
        };
        second.store(high, Ordering::Relaxed);
        first.store(low, Ordering::Release);
        self.tail += 1;
        Ok(())
    }

    /// Reads the next descriptor as the host; `None` at the tail.
    ///
    /// # Errors
    /// The descriptor is malformed (IQE).
    pub(super) fn next(
        &mut self,
        memory: &Arena,
    ) -> Option<Result<InvalidationDescriptor, InvalidationError>> {
        if self.head >= self.tail {
            return None;
        }
        let at = self.base;
        let at = at.wrapping_add(self.head % ENTRIES * DESCRIPTOR_BYTES);
        self.head += 1;
        let raw = match memory.words(at, 2) {
            Ok([low, high]) => {
                let low = low.load(Ordering::Acquire);
                [low, high.load(Ordering::Relaxed)]
            }
            _ => [0; 2],
        };
        let descriptor = InvalidationDescriptor::decode(raw);
        Some(descriptor.map_err(|_| InvalidationError::Failed))
    }

    /// Completes a wait descriptor.
    ///
    /// # Errors
    /// The status word lies outside memory.
    pub(super) fn write_status(
        memory: &Arena,
        status: PhysAddr,
        data: u32,
    ) -> Result<(), InvalidationError> {
        let word = memory.word(status);
        let word = word.map_err(|_| InvalidationError::Failed)?;
        word.store(data.into(), Ordering::Release);
        Ok(())
    }

    /// Returns true if the host has completed `ticket`.
    ///
    /// # Errors
    /// The status word lies outside memory.
    pub(super) fn is_completed(
        &self,
        memory: &Arena,
        ticket: Ticket,
    ) -> Result<bool, InvalidationError> {
        let status = memory.word(self.status);
        let status = status.map_err(|_| InvalidationError::Failed)?;
        Ok(status.load(Ordering::Acquire) >= ticket.get())
    }
}
