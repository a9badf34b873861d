//! The work that a replay adds to its steps.

use ringfence_dma::MapError;
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{Nanos, PhysRange};

use crate::error::LabError;
use crate::layer::{DmaOps, MappingToken, OpKey, UnmapOutcome};
use crate::plan::Plan;

/// A map of the plan.
#[derive(Debug, Clone, Copy)]
pub struct MapStep<'a> {
    /// Slot of the mapping.
    pub id: MappingId,
    /// Device, CPU and direction.
    pub key: OpKey,
    /// Segments of the buffer.
    pub pieces: &'a [PhysRange],
}

/// Callbacks of a [`Replay`](super::Replay). The defaults do nothing.
pub trait ReplayHooks {
    /// Starts a step at this time.
    #[inline(always)]
    fn begin_step(&mut self, time: Nanos) {
        let _ = time;
    }

    /// Precedes a map, or work that belongs to maps.
    #[inline(always)]
    fn begin_map(&mut self) {}

    /// Attaches the device of a map.
    ///
    /// # Errors
    /// The device cannot be attached.
    #[inline(always)]
    fn attach<D: DmaOps + ?Sized>(
        &mut self,
        layer: &mut D,
        device: DeviceIndex,
    ) -> Result<(), LabError> {
        let _ = (layer, device);
        Ok(())
    }

    /// Precedes an unmap, or work that belongs to unmaps.
    #[inline(always)]
    fn begin_unmap(&mut self) {}

    /// Ends a step.
    #[inline(always)]
    fn end_step(&mut self) {}

    /// Returns the number that stands for the buffer of the next map.
    fn buffer(&mut self, id: MappingId) -> u64;

    /// Follows a successful map, whose allocator took `steps` steps.
    ///
    /// # Errors
    /// The trace exceeds a limit.
    fn mapped<D: DmaOps + ?Sized>(
        &mut self,
        layer: &D,
        map: MapStep<'_>,
        token: &MappingToken,
        steps: u32,
    ) -> Result<(), LabError>;

    /// Follows a map that found its ring full.
    #[inline(always)]
    fn ring_full(&mut self) {}

    /// Follows a map that the layer refused for another reason.
    ///
    /// # Errors
    /// The trace exceeds a limit.
    fn refused(&mut self, key: OpKey, error: MapError) -> Result<(), LabError>;

    /// Follows a map that joined the queue of its full ring.
    #[inline(always)]
    fn stalled(&mut self, key: OpKey) {
        let _ = key;
    }

    /// Follows the unmap of a mapping whose map still waited for a slot.
    fn stalled_out(&mut self, key: OpKey);

    /// Precedes the unmap of a mapping.
    #[inline(always)]
    fn unmapping<D: DmaOps + ?Sized>(&mut self, layer: &D, key: OpKey, token: &MappingToken) {
        let _ = (layer, key, token);
    }

    /// Follows an unmap.
    ///
    /// # Errors
    /// The trace exceeds a limit.
    fn unmapped<D: DmaOps + ?Sized>(
        &mut self,
        layer: &D,
        key: OpKey,
        outcome: UnmapOutcome,
    ) -> Result<(), LabError>;

    /// Returns the list for the buffers that the end of a burst returns; `None` to drop them.
    #[inline(always)]
    fn returned(&mut self) -> Option<&mut Vec<u64>> {
        None
    }

    /// Follows the end of a burst.
    #[inline(always)]
    fn burst_ended(&mut self) {}

    /// Returns true if the layer runs its timers at this tick of `plan`.
    #[inline(always)]
    fn takes_tick<D: DmaOps + ?Sized>(&self, layer: &D, plan: &Plan, time: Nanos) -> bool {
        let _ = (layer, plan, time);
        true
    }

    /// Follows a tick.
    #[inline(always)]
    fn ticked<D: DmaOps + ?Sized>(&mut self, layer: &mut D) {
        let _ = layer;
    }
}
