//! The meter of modes with shadow buffers.
//!
//! Their cost is the copy. It has no component to ablate, so all cycles count as `other`: also the
//! maps, the unmaps and the descriptors of the large buffers that a mode maps. Replays copy real
//! bytes between the trace's addresses and the pool. All timed replays share one memory,
//! because the contents of buffers do not matter and a trace may have many pages.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_dma::MapError;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{Nanos, PageSize, PhysAddr, PhysMemory, PhysRange};

use super::{Ablations, AllocTrace, Clock, TimedReplay};
use crate::error::LabError;
use crate::layer::{InvalidationQueue, LayerPlatform};
use crate::plan::{Plan, Step};
use crate::platform::{DATA_BYTES, MEMORY_BYTES, TABLE_BYTES};
use crate::replay::{DynTimedReplay, PlanResources};
use crate::shadow::CopyParts;

/// A timed replay that copies buffers of `memory`.
struct Copying {
    replay: Box<dyn DynTimedReplay>,
    memory: Rc<Arena>,
}

impl Copying {
    /// Touches the pages of the plan's buffers, so that page faults of this process do not count as
    /// work of the layer.
    fn touch(&self, plan: &Plan) {
        let page = PageSize::Size4K.bytes();
        for timed in &plan.steps {
            let Step::Map { first, count, .. } = timed.step else {
                continue;
            };
            for piece in plan.segments(first, count) {
                let start = piece.start().align_down(page).get();
                for at in (start..=piece.last().get()).step_by(page as usize) {
                    if let Ok(word) = self.memory.word(PhysAddr::new(at)) {
                        word.fetch_add(0, Ordering::Relaxed);
                    }
                }
            }
        }
    }
}

impl DynTimedReplay for Copying {
    fn prepare_for(&mut self, needs: &PlanResources) -> Result<(), LabError> {
        self.replay.prepare_for(needs)
    }

    fn run_plan(&mut self, plan: &Plan, clock: &mut Clock, trace: Option<&AllocTrace>) {
        self.touch(plan);
        self.replay.run_plan(plan, clock, trace);
    }

    fn refusals(&self) -> Option<(u64, MapError)> {
        self.replay.refusals()
    }
}

impl Ablations {
    /// Creates the meter of a mode with shadow buffers.
    ///
    /// # Errors
    /// Memory is short.
    pub fn shadow<P: CopyParts>(
        parts: P,
        coherency: Coherency,
        repetitions: usize,
    ) -> Result<Self, LabError> {
        let memory = Rc::new(Arena::new(MEMORY_BYTES)?);
        // The recorder, and two replays for each repetition.
        let replays = 1 + 2 * repetitions.max(1) as u64;
        let tables = (TABLE_BYTES / replays) & !(PageSize::Size4K.bytes() - 1);
        let made = Cell::new(0);
        let whole = || -> Result<Box<dyn DynTimedReplay>, LabError> {
            let start = PhysAddr::new(DATA_BYTES + made.replace(made.get() + 1) * tables);
            // The queue and its status word have the first two frames.
            let status = start.wrapping_add(PageSize::Size4K.bytes());
            let queue = 2 * PageSize::Size4K.bytes();
            let frames = PhysRange::new(start.wrapping_add(queue), tables.saturating_sub(queue));
            let region = frames.ok_or(LabError::Internal("tables"))?;
            let platform = LayerPlatform {
                frames: Rc::new(Frames::new(Rc::clone(&memory), region)),
                arena: Rc::clone(&memory),
                invalidator: InvalidationQueue::new(Rc::clone(&memory), start, status),
                now: Nanos(0),
            };
            let make = parts.make_space(coherency);
            Ok(Box::new(Copying {
                replay: Box::new(TimedReplay::new(parts.flush(), platform, make)),
                memory: Rc::clone(&memory),
            }))
        };
        Self::undivided(repetitions, &whole)
    }
}
