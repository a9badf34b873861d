//! Frames for tables and the queue, and write-back of their changes.

use ringfence_pgtable::{Coherency, TableError};
use ringfence_types::{FrameSource, PageSize, PhysAddr, PhysMemory};

/// Allocates a zeroed frame of 4 KiB that lies in memory.
pub(crate) fn fresh_frame(
    coherency: Coherency,
    memory: &impl PhysMemory,
    frames: &impl FrameSource,
) -> Result<PhysAddr, TableError> {
    if frames.frame_size() != PageSize::Size4K {
        return Err(TableError::FrameSize);
    }
    let frame = frames.alloc_zeroed()?;
    if memory.table(frame).is_err() {
        frames.free(frame);
        return Err(TableError::Memory);
    }
    write_back(coherency, memory, frame, PageSize::Size4K.bytes());
    Ok(frame)
}

/// Writes changed bytes back if the unit does not snoop, and waits.
pub(crate) fn write_back(coherency: Coherency, memory: &impl PhysMemory, at: PhysAddr, bytes: u64) {
    if coherency == Coherency::NonCoherent {
        memory.write_back(at, bytes);
        memory.drain();
    }
}
