//! The replay's own loop without the DMA layer.

use std::hint::black_box;

use super::{AllocTrace, BLOCK, Clock, DynTimedReplay};
use crate::error::LabError;
use crate::layer::MappingToken;
use crate::plan::{Plan, Step, TimedStep};
use crate::replay::PlanResources;

/// The replay's own loop. The meter subtracts its cycles, so it touches what a timed replay's loop
/// touches besides the layer.
#[derive(Debug, Default)]
pub struct EmptyLoop {
    tokens: Vec<MappingToken>,
}

impl EmptyLoop {
    /// Performs the steps like [`TimedReplay::run`](super::TimedReplay::run).
    pub fn run(&mut self, plan: &Plan, clock: &mut Clock) {
        for block in plan.steps.chunks(BLOCK) {
            self.run_block(plan, block, clock);
        }
    }

    /// Performs the steps like [`TimedReplay::run_block`](super::TimedReplay::run_block).
    pub fn run_block(&mut self, plan: &Plan, block: &[TimedStep], clock: &mut Clock) {
        clock.begin();
        for timed in block {
            black_box(timed.time);
            match timed.step {
                Step::Map {
                    id, first, count, ..
                } => {
                    clock.map();
                    black_box(plan.segments(first, count));
                    black_box(self.tokens.get_mut(id.index()));
                }
                Step::Unmap { id, .. } => {
                    clock.unmap();
                    black_box(self.tokens.get_mut(id.index()));
                }
                Step::EndBurst { device, .. } => {
                    clock.unmap();
                    black_box(device);
                }
                Step::Doorbell { device, .. } => {
                    clock.map();
                    black_box(device);
                }
                Step::EndDescriptor { .. } | Step::Tick => clock.unmap(),
            }
        }
        clock.end();
    }
}

impl DynTimedReplay for EmptyLoop {
    fn prepare_for(&mut self, _needs: &PlanResources) -> Result<(), LabError> {
        Ok(())
    }

    fn run_plan(&mut self, plan: &Plan, clock: &mut Clock, _trace: Option<&AllocTrace>) {
        self.run(plan, clock);
    }

    fn layer_type(&self) -> &'static str {
        "no layer"
    }
}
