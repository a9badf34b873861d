//! Frames of the unit.

use ringfence_types::{FrameSource, PageSize, PhysAddr, PhysMemory, TABLE_WORDS};

use crate::UnitError;
use crate::device_entry::POINTER;

/// Allocates a zeroed frame that lies in memory and that the unit can address.
pub(crate) fn fresh_frame<M: PhysMemory, S: FrameSource>(
    mem: &M,
    frames: &S,
) -> Result<PhysAddr, UnitError> {
    let frame = frames.alloc_zeroed()?;
    let fits = frames.frame_size() >= PageSize::Size4K && frame.get() & !POINTER == 0;
    if !fits || mem.words(frame, TABLE_WORDS).is_err() {
        frames.free(frame);
        return Err(UnitError::Memory);
    }
    Ok(frame)
}
