//! The driver's side of a ring whose device completes descriptors in order.

use super::{COMPLETION_BYTES, CompletionQueue, RawCompletion, RingBase, RingMemory, RingSize};
use crate::api::{ApiError, DeviceRing, DmaApi};
use crate::{ByteMemory, Unreachable};

/// Addresses of a ring and its completions for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptors, which the device reads.
    pub descriptors: RingBase,
    /// Completions, which the device writes.
    pub completions: RingBase,
}

/// Error: the device wrote an invalid completion. A driver must not trust shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("queue {} ({}): the device reports {kind}", .ring.queue, .ring.direction)]
pub struct MalformedCompletion {
    /// Ring whose completions the driver was reading.
    pub ring: DeviceRing,
    /// Violation that the driver found.
    pub kind: CompletionFault,
}

/// Violation in a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompletionFault {
    /// No descriptor is outstanding.
    #[error("a completion without an outstanding command")]
    Nothing,
    /// The completion's descriptor is not the oldest one.
    #[error("entry {found} instead of the oldest one, {oldest}")]
    OutOfOrder {
        /// Descriptor in the completion.
        found: u32,
        /// The oldest descriptor.
        oldest: u32,
    },
    /// The completion's command is not outstanding.
    #[error("command {command} is not outstanding")]
    NotOutstanding {
        /// Command in the completion.
        command: u32,
    },
    /// The reported length exceeds the buffers.
    #[error("{found} bytes where {at_most} fit")]
    Length {
        /// Reported length in bytes.
        found: u32,
        /// Length of the buffers in bytes.
        at_most: u32,
    },
    /// The device reported this unknown status.
    #[error("the unknown status {0:#x}")]
    Status(u16),
    /// The completion is for another queue.
    #[error("a completion for queue {0}")]
    Queue(u16),
}

/// Descriptors, completions, and the driver's record `T` of each descriptor that the device owns.
/// The driver never reads descriptors back from memory, because the device may have changed them.
#[derive(Debug)]
pub struct OrderedRing<T> {
    ring: DeviceRing,
    descriptors: RingMemory,
    completions: CompletionQueue,
    /// Oldest descriptor that the device owns; free-running.
    head: u32,
    /// Next descriptor to fill; free-running. The device owns `[head, tail)`.
    tail: u32,
    records: Vec<Option<T>>,
}

impl<T> OrderedRing<T> {
    /// Allocates an empty ring of `size` descriptors of `entry_bytes` bytes.
    ///
    /// # Errors
    /// Returns the allocation's error. Nothing stays allocated, unless a release fails too.
    pub fn alloc<A: DmaApi>(
        api: &mut A,
        ring: DeviceRing,
        size: RingSize,
        entry_bytes: u32,
    ) -> Result<Self, ApiError> {
        let descriptors = RingMemory::alloc(api, ring, size, entry_bytes)?;
        // With as many completions as descriptors, the device never overtakes the driver.
        let completions = match RingMemory::alloc(api, ring, size, COMPLETION_BYTES) {
            Ok(memory) => CompletionQueue::new(memory),
            Err(error) => {
                // The caller gets the first error. Memory that is not freed leaks, which is safe.
                let _ = descriptors.free(api, ring);
                return Err(error);
            }
        };
        Ok(Self {
            ring,
            descriptors,
            completions,
            head: 0,
            tail: 0,
            records: (0..size.entries()).map(|_| None).collect(),
        })
    }

    /// Returns the values for the device's base registers.
    pub fn addresses(&self) -> RingAddresses {
        RingAddresses {
            descriptors: self.descriptors.base(),
            completions: self.completions.base(),
        }
    }

    /// Returns the ring's id.
    #[inline]
    pub const fn ring(&self) -> DeviceRing {
        self.ring
    }

    /// Returns the value for the tail doorbell, which is free-running.
    #[inline]
    pub const fn tail(&self) -> u32 {
        self.tail
    }

    /// Returns the number of descriptors that the device owns.
    #[inline]
    pub const fn outstanding(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    /// Returns true if the device owns all descriptors.
    #[inline]
    pub const fn is_full(&self) -> bool {
        self.outstanding() >= self.descriptors.size().entries()
    }

    #[inline]
    fn record(&mut self, counter: u32) -> Option<&mut Option<T>> {
        let index = self.descriptors.size().index(counter) as usize;
        self.records.get_mut(index)
    }

    /// Writes `descriptor` at the tail. The device gets it with the next doorbell.
    ///
    /// # Errors
    /// Returns `record`; with an error if the memory is not accessible, without one if the ring is
    /// full.
    #[inline]
    pub fn post<M: ByteMemory>(
        &mut self,
        memory: &M,
        descriptor: &[u8],
        record: T,
    ) -> Result<(), (T, Option<Unreachable>)> {
        if self.is_full() {
            return Err((record, None));
        }
        let tail = self.tail;
        if let Err(error) = self.descriptors.write(memory, tail, descriptor) {
            return Err((record, Some(error)));
        }
        match self.record(tail) {
            Some(slot) => *slot = Some(record),
            None => return Err((record, None)),
        }
        self.tail = tail.wrapping_add(1);
        Ok(())
    }

    /// Returns the next completion, if any, with the record of the oldest descriptor. `check`
    /// decodes and validates the completion, given the free-running number of that descriptor and
    /// its record. An invalid completion stops the ring: every further
    /// call returns the same error, until [`drain`](Self::drain).
    ///
    /// # Errors
    /// The memory is not accessible, or the completion is invalid.
    #[inline]
    pub fn completed<M: ByteMemory, C>(
        &mut self,
        memory: &M,
        check: impl FnOnce(&RawCompletion, u32, &T) -> Result<C, CompletionFault>,
    ) -> Result<Option<(C, T)>, CompletionError> {
        let Some(raw) = self.completions.peek(memory)? else {
            return Ok(None);
        };
        let ring = self.ring;
        let malformed = |kind| CompletionError::Malformed(MalformedCompletion { ring, kind });
        let head = self.head;
        let slot = self
            .record(head)
            .ok_or(malformed(CompletionFault::Nothing))?;
        // Entries outside [head, tail) have no record.
        let record = slot.take().ok_or(malformed(CompletionFault::Nothing))?;
        match check(&raw, head, &record) {
            Ok(completion) => {
                self.head = head.wrapping_add(1);
                self.completions.advance();
                Ok(Some((completion, record)))
            }
            Err(kind) => {
                *slot = Some(record);
                Err(malformed(kind))
            }
        }
    }

    /// Removes all descriptors, and passes their records to `each`, oldest first. The caller must
    /// have stopped the device.
    pub fn drain(&mut self, mut each: impl FnMut(T)) {
        while self.head != self.tail {
            let head = self.head;
            if let Some(record) = self.record(head).and_then(Option::take) {
                each(record);
            }
            self.head = head.wrapping_add(1);
        }
    }

    /// Frees the shared memory. Records that were not drained are lost.
    ///
    /// # Errors
    /// Returns the first error. Memory that was not freed is lost, because the device may still
    /// access it.
    pub fn free<A: DmaApi>(self, api: &mut A) -> Result<(), ApiError> {
        let descriptors = self.descriptors.free(api, self.ring);
        let completions = self.completions.free(api, self.ring);
        descriptors.and(completions)
    }
}

/// Reason why a completion cannot be returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CompletionError {
    /// The memory is not accessible.
    #[error(transparent)]
    Memory(#[from] Unreachable),
    /// The device wrote an invalid completion.
    #[error(transparent)]
    Malformed(MalformedCompletion),
}
