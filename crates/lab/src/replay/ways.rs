//! The ways of buffers: the memory that a device used, and the return of the buffer.

use serde::Serialize;

/// Some of the buffers of a trace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Buffers {
    /// Number of buffers.
    pub buffers: u64,
    /// Bytes of buffers. If parts of a buffer went different ways, each part counts with its way.
    pub bytes: u64,
}

impl Buffers {
    fn add(&mut self, bytes: u64) {
        self.buffers += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// The buffers that a trace unmaps, by their way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BufferCounts {
    /// The device used memory of its pool, which stays mapped: a copy, or a buffer that the driver
    /// took from the pool.
    pub pooled: Buffers,
    /// The device used the buffer itself, and the unmap returned the buffer.
    pub mapped: Buffers,
    /// The device used the buffer itself, and the layer withheld it after the unmap.
    pub withheld: Buffers,
}

impl BufferCounts {
    /// Counts a buffer of `bytes` bytes. The device used copies of `pooled` of them.
    pub(super) fn count(&mut self, bytes: u64, pooled: u64, is_withheld: bool) {
        let itself = bytes.saturating_sub(pooled);
        if itself == 0 {
            return self.pooled.add(pooled);
        }
        self.pooled.bytes = self.pooled.bytes.saturating_add(pooled);
        match is_withheld {
            true => self.withheld.add(itself),
            false => self.mapped.add(itself),
        }
    }
}
