//! Fujita's pseudo driver of a SCSI host adapter (Fujita section 3.2): it maps a request, transfers
//! nothing, and unmaps. Only the cost of the mapping layer remains.

use std::collections::VecDeque;

use ringfence_types::PhysRange;

use super::{BlockError, Operation, PAGE_BYTES};
use crate::api::{DeviceRing, DmaApi};
use crate::{Buffer, Pool};

/// The adapter, with the page frames of its requests. Each request uses the next page.
#[derive(Debug)]
pub struct PseudoScsi {
    frames: VecDeque<Buffer>,
    all: usize,
    bytes: u32,
    ring: DeviceRing,
}

impl PseudoScsi {
    /// Size of a request in Fujita's benchmark, in bytes.
    pub const REQUEST: u32 = 1024;
    /// Number of page frames for requests (decision 0011).
    pub const FRAMES: u64 = 4096;

    /// Creates an adapter with requests of `bytes` bytes, at most a page, for the pages of
    /// `memory`, which must be page-aligned.
    ///
    /// # Errors
    /// `memory` holds no whole page, or `bytes` exceed a page.
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
            ring: DeviceRing::new(0, operation.direction()),
        })
    }

    /// Runs one request alone: maps, unmaps, and ends the burst.
    ///
    /// # Errors
    /// Returns the layer's error. The frame is lost if the layer does not return it.
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
                return Err(BlockError::of_map(refused.failure, self.ring));
            }
        };
        let back = api.unmap(self.ring, mapped.handle)?;
        self.frames.extend(back);
        let frames = &mut self.frames;
        Ok(api.end_burst(self.ring, |frame| frames.push_back(frame))?)
    }

    /// Returns the number of frames that were not returned.
    pub fn lost(&self) -> usize {
        self.all - self.frames.len()
    }
}
