//! A timed replay: the DMA layer alone, without device and oracle.

mod clock;
mod empty_loop;
mod tsc;

pub use clock::Clock;
pub use empty_loop::EmptyLoop;
#[cfg(test)]
pub(crate) use tsc::counted;
pub use tsc::cycles;

use std::hint::black_box;

use ringfence_dma::MapError;
use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::Space;
use ringfence_trace::MappingId;
use ringfence_types::{Invalidator, RequesterId};

use super::hooks::{MapStep, ReplayHooks};
use super::{PlanResources, Replay};
use crate::alloc_trace::AllocTrace;
use crate::error::LabError;
use crate::layer::{
    AttachInfo, DmaLayer, DmaOps, LayerPlatform, MappingToken, OpKey, SpaceResult, UnmapOutcome,
};
use crate::plan::{Plan, TimedStep};

/// Number of steps between clock reads: enough to make the reads negligible, and few enough that
/// other processes disturb few blocks.
const BLOCK: usize = 1024;

/// A replay that reads the clock.
pub struct TimedReplay<D: DmaOps + ?Sized> {
    replay: Replay<D>,
    counts: Counts,
}

/// Maps that a timed replay did not perform.
#[derive(Debug, Default)]
struct Counts {
    refused: u64,
    first_refusal: Option<MapError>,
    stalled_out: u64,
}

impl<S: Space, F: FlushPolicy<S, u64>, I: Invalidator> TimedReplay<DmaLayer<S, F, I>> {
    /// Creates a replay of a layer without domains. `make` creates the space of each device.
    pub fn new(
        flush: F,
        platform: LayerPlatform<I>,
        make: impl FnMut(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<S> + 'static,
    ) -> Self {
        Self::of(Box::new(DmaLayer::new(flush, platform, make)))
    }
}

impl<D: DmaOps + ?Sized> TimedReplay<D> {
    /// Creates a replay that drives `layer`.
    pub fn of(layer: Box<D>) -> Self {
        Self {
            replay: Replay::new(layer),
            counts: Counts::default(),
        }
    }

    /// Returns the layer.
    pub fn layer(&self) -> &D {
        &self.replay.layer
    }

    /// Allocates everything that the steps of `plan` need, so that the timed loop does not
    /// allocate.
    ///
    /// # Errors
    /// Memory is short, or a device cannot be attached.
    pub fn prepare(&mut self, plan: &Plan) -> Result<(), LabError> {
        self.prepare_for(&PlanResources::of(plan))
    }

    /// Returns the number of refused maps and the first error; `None` if the layer refused no map.
    pub fn refusals(&self) -> Option<(u64, MapError)> {
        let first = self.counts.first_refusal?;
        Some((self.counts.refused, first))
    }

    /// Performs the steps of `plan` and reports each to `clock`. With a trace, records the ranges
    /// that the maps got.
    pub fn run(&mut self, plan: &Plan, clock: &mut Clock, trace: Option<&AllocTrace>) {
        for block in plan.steps.chunks(BLOCK) {
            self.run_block(plan, block, clock, trace);
        }
    }

    /// Performs the steps `block` of `plan` as one block of `clock`. The other arguments are those
    /// of [`run`](Self::run).
    pub fn run_block(
        &mut self,
        plan: &Plan,
        block: &[TimedStep],
        clock: &mut Clock,
        trace: Option<&AllocTrace>,
    ) {
        let mut hooks = TimedHooks {
            clock,
            trace,
            counts: &mut self.counts,
        };
        hooks.clock.begin();
        // These hooks never fail.
        let _ = self.replay.run(plan, block, &mut hooks);
        hooks.clock.end();
    }
}

/// A timed replay of any layer.
pub trait DynTimedReplay {
    /// Prepares for the steps of a plan.
    ///
    /// # Errors
    /// Memory is short.
    fn prepare_for(&mut self, needs: &PlanResources) -> Result<(), LabError>;

    /// Performs the steps of a plan, as [`TimedReplay::run`] does.
    fn run_plan(&mut self, plan: &Plan, clock: &mut Clock, trace: Option<&AllocTrace>);

    /// Returns the number of refused maps and the first error; `None` if the layer refused no map.
    fn refusals(&self) -> Option<(u64, MapError)> {
        None
    }

    /// Returns the number of maps in the trace that never got a slot, or still wait for one. The
    /// second number counts those whose unmap was skipped.
    fn stalled_out(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Returns the type name of the layer that the replay drives.
    fn layer_type(&self) -> &'static str;

    /// Returns true if the layer's unmaps return before another core has executed them.
    fn unmaps_later(&self) -> bool {
        false
    }
}

impl<D: DmaOps + ?Sized> DynTimedReplay for TimedReplay<D> {
    fn prepare_for(&mut self, needs: &PlanResources) -> Result<(), LabError> {
        let layer = &mut self.replay.layer;
        for &device in &needs.devices {
            if !layer.is_attached(device) {
                layer.attach(device, RequesterId::new(device.0))?;
            }
        }
        self.replay.prepare(needs)
    }

    fn run_plan(&mut self, plan: &Plan, clock: &mut Clock, trace: Option<&AllocTrace>) {
        self.run(plan, clock, trace);
    }

    fn refusals(&self) -> Option<(u64, MapError)> {
        TimedReplay::refusals(self)
    }

    fn stalled_out(&self) -> (u64, u64) {
        let skipped = self.counts.stalled_out;
        (skipped + self.replay.waiting() as u64, skipped)
    }

    fn layer_type(&self) -> &'static str {
        std::any::type_name::<D>()
    }

    fn unmaps_later(&self) -> bool {
        self.layer().unmaps_later()
    }
}

/// The hooks of a timed replay.
struct TimedHooks<'a> {
    clock: &'a mut Clock,
    trace: Option<&'a AllocTrace>,
    counts: &'a mut Counts,
}

impl ReplayHooks for TimedHooks<'_> {
    #[inline(always)]
    fn begin_map(&mut self) {
        self.clock.map();
    }

    #[inline(always)]
    fn begin_unmap(&mut self) {
        self.clock.unmap();
    }

    #[inline(always)]
    fn buffer(&mut self, id: MappingId) -> u64 {
        u64::from(id.0)
    }

    #[inline(always)]
    fn mapped<D: DmaOps + ?Sized>(
        &mut self,
        layer: &D,
        map: MapStep<'_>,
        token: &MappingToken,
        _steps: u32,
    ) -> Result<(), LabError> {
        if let Some(trace) = self.trace {
            layer.each_reserved(map.key, token, map.pieces.len(), &mut |range| {
                trace.record(range);
            });
        }
        Ok(())
    }

    #[inline(always)]
    fn ring_full(&mut self) {
        if let Some(trace) = self.trace {
            trace.record(None);
        }
    }

    #[inline(always)]
    fn refused(&mut self, _key: OpKey, error: MapError) -> Result<(), LabError> {
        self.ring_full();
        self.counts.refused += 1;
        self.counts.first_refusal.get_or_insert(error);
        Ok(())
    }

    fn stalled_out(&mut self, _key: OpKey) {
        self.counts.stalled_out += 1;
    }

    #[inline(always)]
    fn unmapped<D: DmaOps + ?Sized>(
        &mut self,
        _layer: &D,
        _key: OpKey,
        outcome: UnmapOutcome,
    ) -> Result<(), LabError> {
        let _ = black_box(outcome.into_buffer());
        Ok(())
    }
}
