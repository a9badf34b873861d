//! A ring whose device completes descriptors in order: what its driver keeps beside the shared
//! memory.

use core::fmt;

use super::{COMPLETION_BYTES, CompletionQueue, RawCompletion, RingBase, RingMemory, RingSize};
use crate::api::{ApiError, DeviceRing, DmaApi};
use crate::{ByteMemory, Unreachable};

/// Where a device finds a ring and its completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptors.
    pub descriptors: RingBase,
    /// The completions.
    pub completions: RingBase,
}

/// Something in shared memory that an honest device does not write. A driver believes nothing it
/// reads there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MalformedCompletion {
    /// The queue.
    pub ring: DeviceRing,
    /// What is wrong.
    pub kind: CompletionFault,
}

/// What is wrong with a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompletionFault {
    /// Nothing is outstanding.
    Nothing,
    /// It names another descriptor than the oldest one, or a command that is not outstanding.
    Index {
        /// What it names.
        found: u32,
        /// The oldest, where there is an order.
        expected: Option<u32>,
    },
    /// More bytes than the buffers hold.
    Length {
        /// Bytes reported.
        found: u32,
        /// Bytes at most.
        at_most: u32,
    },
    /// A status that the specification does not know.
    Status(u16),
    /// It names another queue.
    Queue(u16),
}

impl fmt::Display for MalformedCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceRing { queue, direction } = self.ring;
        write!(f, "queue {queue} ({direction}): the device reports ")?;
        match self.kind {
            CompletionFault::Nothing => f.write_str("a completion, and nothing is outstanding"),
            CompletionFault::Index {
                found,
                expected: Some(expected),
            } => write!(f, "entry {found}, not the oldest one, {expected}"),
            CompletionFault::Index { found, .. } => {
                write!(f, "command {found}, which is not outstanding")
            }
            CompletionFault::Length { found, at_most } => {
                write!(f, "{found} bytes where {at_most} fit")
            }
            CompletionFault::Status(status) => {
                write!(f, "status {status:#x}, which does not exist")
            }
            CompletionFault::Queue(queue) => write!(f, "a completion for queue {queue}"),
        }
    }
}

impl core::error::Error for MalformedCompletion {}

/// Descriptors, completions, and the driver's own record `T` of each descriptor that the device
/// owns. Descriptors in memory are written and never read back: the device may have rewritten them.
#[derive(Debug)]
pub struct OrderedRing<T> {
    ring: DeviceRing,
    descriptors: RingMemory,
    completions: CompletionQueue,
    /// Free-running: the oldest descriptor that the device owns.
    head: u32,
    /// Free-running: the one that is filled next. The device owns `[head, tail)`.
    tail: u32,
    records: Vec<Option<T>>,
}

impl<T> OrderedRing<T> {
    /// Allocates an empty ring of `size` descriptors of `entry_bytes` bytes.
    ///
    /// # Errors
    /// The allocation's; nothing stays allocated.
    pub fn alloc<A: DmaApi>(
        api: &mut A,
        ring: DeviceRing,
        size: RingSize,
        entry_bytes: u32,
    ) -> Result<Self, ApiError> {
        let descriptors = RingMemory::alloc(api, ring, size, entry_bytes)?;
        // As many completions as descriptors: the device never overtakes the driver.
        let completions = match RingMemory::alloc(api, ring, size, COMPLETION_BYTES) {
            Ok(memory) => CompletionQueue::new(memory),
            Err(error) => {
                descriptors.free(api, ring)?;
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

    /// For the device's base registers.
    pub fn addresses(&self) -> RingAddresses {
        RingAddresses {
            descriptors: self.descriptors.base(),
            completions: self.completions.base(),
        }
    }

    /// Which ring it is.
    #[inline]
    pub const fn ring(&self) -> DeviceRing {
        self.ring
    }

    /// For the tail doorbell: free-running.
    #[inline]
    pub const fn tail(&self) -> u32 {
        self.tail
    }

    /// How many descriptors the device owns.
    #[inline]
    pub const fn outstanding(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    /// Whether the device owns all of them.
    #[inline]
    pub const fn is_full(&self) -> bool {
        self.outstanding() >= self.descriptors.size().entries()
    }

    #[inline]
    fn record(&mut self, counter: u32) -> Option<&mut Option<T>> {
        let index = self.descriptors.size().index(counter) as usize;
        self.records.get_mut(index)
    }

    /// Writes `descriptor` at the tail and gives it to the device at the next doorbell.
    ///
    /// # Errors
    /// The ring is full, or memory's error: `record` comes back.
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
            Some(place) => *place = Some(record),
            None => return Err((record, None)),
        }
        self.tail = tail.wrapping_add(1);
        Ok(())
    }

    /// The next completion, if any, with the record of the oldest descriptor; `index` finds in it
    /// the descriptor that it names. After a lie the ring stands still: every further call tells
    /// the same lie, until [`drain`](Self::drain).
    ///
    /// # Errors
    /// Memory's, or the lie.
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
        let lie = |kind| CompletionError::Lie(MalformedCompletion { ring, kind });
        let head = self.head;
        let place = self.record(head).ok_or(lie(CompletionFault::Nothing))?;
        // Entries outside [head, tail) have no record.
        let record = place.take().ok_or(lie(CompletionFault::Nothing))?;
        match check(&raw, head, &record) {
            Ok(completion) => {
                self.head = head.wrapping_add(1);
                self.completions.advance();
                Ok(Some((completion, record)))
            }
            Err(kind) => {
                *place = Some(record);
                Err(lie(kind))
            }
        }
    }

    /// Takes all descriptors away from the device, which the caller has stopped; `each` receives
    /// the records, oldest first.
    pub fn drain(&mut self, mut each: impl FnMut(T)) {
        while self.head != self.tail {
            let head = self.head;
            if let Some(record) = self.record(head).and_then(Option::take) {
                each(record);
            }
            self.head = head.wrapping_add(1);
        }
    }

    /// Frees the shared memory. What was not drained is lost.
    ///
    /// # Errors
    /// The first of both; the memory is lost.
    pub fn free<A: DmaApi>(self, api: &mut A) -> Result<(), ApiError> {
        let descriptors = self.descriptors.free(api, self.ring);
        let completions = self.completions.free(api, self.ring);
        descriptors.and(completions)
    }
}

/// Why there is no completion to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionError {
    /// Memory's.
    Memory(Unreachable),
    /// The device's.
    Lie(MalformedCompletion),
}

impl From<Unreachable> for CompletionError {
    fn from(error: Unreachable) -> Self {
        Self::Memory(error)
    }
}
