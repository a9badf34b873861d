//! The frames that the driver shares with the device.

use ringfence_pgtable::{Coherency, TableMemory};
use ringfence_types::{FrameSource, PhysAddr, PhysMemory};

use crate::error::UnitError;

/// Frames of both queues and their buffers.
#[derive(Debug)]
pub(crate) struct QueueFrames {
    /// Ring of the request queue.
    pub(crate) requests: PhysAddr,
    /// Buffers of the request queue.
    pub(crate) buffers: PhysAddr,
    /// Ring and buffers of the event queue.
    pub(crate) events: PhysAddr,
    /// Buffer of PROBE, if the device has it.
    pub(crate) probe: Option<PhysAddr>,
}

impl QueueFrames {
    pub(crate) fn alloc(
        memory: &impl PhysMemory,
        frames: &impl FrameSource,
        with_probe: bool,
    ) -> Result<Self, UnitError> {
        let mut taken = [None; 4];
        let wanted = if with_probe { 4 } else { 3 };
        let tables = TableMemory::new(memory, Coherency::Coherent, u64::BITS);
        for slot in taken.iter_mut().take(wanted) {
            *slot = tables.frame(frames).ok();
        }
        match taken {
            [Some(requests), Some(buffers), Some(events), probe]
                if probe.is_some() == with_probe =>
            {
                Ok(Self {
                    requests,
                    buffers,
                    events,
                    probe,
                })
            }
            _ => {
                for frame in taken.into_iter().flatten() {
                    frames.free(frame);
                }
                Err(UnitError::Frames)
            }
        }
    }

    /// Frees the frames. The device does not use them any more.
    pub(crate) fn free(self, frames: &impl FrameSource) {
        let all = [self.requests, self.buffers, self.events];
        for frame in all.into_iter().chain(self.probe) {
            frames.free(frame);
        }
    }
}
