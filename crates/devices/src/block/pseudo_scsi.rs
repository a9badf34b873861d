//! Fujita's pseudo driver of a SCSI host adapter: it maps what it is asked to transfer, transfers
//! nothing, unmaps, and is done (Fujita section 3.2). What is left is the cost of the mapping
//! layer.

use std::collections::VecDeque;

use ringfence_types::PhysRange;

use super::{BlockError, Operation, PAGE_BYTES};
use crate::api::{ApiError, DeviceRing, DmaApi, MapFailure};
use crate::{Buffer, Pool};

/// The adapter, with the page frames of the requests it is given: a page each, one after the other.
#[derive(Debug)]
pub struct PseudoScsi {
    frames: VecDeque<Buffer>,
    all: usize,
    bytes: u32,
    ring: DeviceRing,
}

impl PseudoScsi {
    /// Bytes of a request in the document's benchmark.
    pub const REQUEST: u32 = 1024;
    /// Page frames that requests are for (decision 0011).
    pub const FRAMES: u64 = 4096;

    /// Requests of `bytes` bytes, at most a page, for the pages of `memory`, page-aligned.
    ///
    /// # Errors
    /// There is no whole page, or `bytes` do not fit one.
    pub fn new(memory: PhysRange, bytes: u32, operation: Operation) -> Result<Self, BlockError> {
        if bytes == 0 || u64::from(bytes) > PAGE_BYTES {
            return Err(BlockError::Size { bytes, pages: 1 });
        }
        let pool = Pool::new(memory, PAGE_BYTES);
        let mut pool = pool.map_err(|_| BlockError::TooFewBuffers)?;
        let frames: VecDeque<_> = core::iter::from_fn(|| pool.alloc()).collect();
        Ok(Self {
            all: frames.len(),
            frames,
            bytes,
            ring: DeviceRing {
                queue: 0,
                direction: operation.direction(),
            },
        })
    }

    /// One request, alone: maps, unmaps, ends the burst of one.
    ///
    /// # Errors
    /// The layer's. The frame is lost if it does not come back.
    #[inline]
    pub fn request<A: DmaApi>(&mut self, api: &mut A) -> Result<(), BlockError> {
        let frame = self.frames.pop_front().ok_or(BlockError::TooFewBuffers)?;
        let memory = PhysRange::new(frame.start(), u64::from(self.bytes));
        let Some(memory) = memory else {
            self.frames.push_front(frame);
            return Err(BlockError::TooFewBuffers);
        };
        let mapped = match api.map(self.ring, frame, memory) {
            Ok(mapped) => mapped,
            Err(refused) => {
                self.frames.push_front(refused.buffer);
                return Err(match refused.failure {
                    MapFailure::Busy => BlockError::Full,
                    MapFailure::NoSuchRing => ApiError::NoSuchRing(self.ring).into(),
                    MapFailure::Failed(error) => ApiError::Map(error).into(),
                });
            }
        };
        let back = api.unmap(self.ring, mapped.handle)?;
        self.frames.extend(back);
        let frames = &mut self.frames;
        Ok(api.end_burst(self.ring, |frame| frames.push_back(frame))?)
    }

    /// Frames that did not come back.
    pub fn lost(&self) -> usize {
        self.all - self.frames.len()
    }
}
