//! The meter of modes with a pool that stays mapped.
//!
//! Their cost is the copy, and the pool. It has no component to ablate, so all cycles count as
//! `other`: also the maps, the unmaps and the descriptors of the large buffers that a mode maps.
//! With shadow buffers, replays copy real bytes between the trace's addresses and the pool. With
//! the driver's own buffers, they copy the bytes that the driver inspects to an array. All timed
//! replays share one memory, because the contents of buffers do not matter and a trace may have
//! many pages. A host that owns the table keeps it in a memory of its own.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_dma::MapError;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{Nanos, PageSize, PhysAddr, PhysMemory, PhysRange};

use super::{Ablations, AllocTrace, Clock};
use crate::components::{HostOf, ReplayTable};
use crate::error::LabError;
use crate::hardware::Host;
use crate::layer::{DmaLayer, DmaOps, HasPlatform, LayerPlatform};
use crate::plan::{Plan, Step};
use crate::replay::{DynTimedReplay, PlanResources, TimedReplay};
use crate::replay_platform::{DATA_BYTES, MEMORY_BYTES, TABLE_BYTES};
use crate::shadow::{CopyParts, TimedLayerVisitor};

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

    fn layer_type(&self) -> &'static str {
        self.replay.layer_type()
    }
}

/// Makes the timed replay of a layer.
struct Timed;

impl<I> TimedLayerVisitor<I> for Timed {
    type Output = Box<dyn DynTimedReplay>;

    fn visit<L: DmaOps + HasPlatform<I> + 'static>(self, layer: L) -> Self::Output {
        Box::new(TimedReplay::of(Box::new(layer)))
    }
}

/// The host of a table, and the platform of its layer.
type HostAndPlatform<T> = (
    Option<HostOf<T>>,
    LayerPlatform<<HostOf<T> as Host>::Invalidator>,
);

/// The platforms of timed replays that share one memory, with tables of their own.
struct Platforms {
    memory: Rc<Arena>,
    /// Bytes of the tables of a replay.
    tables: u64,
    made: Cell<u64>,
}

impl Platforms {
    fn new(repetitions: usize) -> Result<Self, LabError> {
        // The recorder, and two replays for each repetition.
        let replays = 1 + 2 * repetitions.max(1) as u64;
        Ok(Self {
            memory: Rc::new(Arena::new(MEMORY_BYTES)?),
            tables: (TABLE_BYTES / replays) & !(PageSize::Size4K.bytes() - 1),
            made: Cell::new(0),
        })
    }

    /// Returns the host that owns the table, if the mode has one, and the platform of its guest.
    fn next<T: ReplayTable>(&self, coherency: Coherency) -> Result<HostAndPlatform<T>, LabError> {
        let number = self.made.replace(self.made.get() + 1);
        let start = PhysAddr::new(DATA_BYTES + number * self.tables);
        let region = PhysRange::new(start, self.tables).ok_or(LabError::Internal("tables"))?;
        let (host, invalidator) = HostOf::<T>::for_meter(&self.memory, coherency)?;
        let platform = LayerPlatform {
            frames: Rc::new(Frames::new(Rc::clone(&self.memory), region)),
            arena: Rc::clone(&self.memory),
            invalidator,
            now: Nanos(0),
        };
        Ok((host, platform))
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
        inspected: u32,
        repetitions: usize,
    ) -> Result<Self, LabError> {
        let platforms = Platforms::new(repetitions)?;
        let whole = || -> Result<Box<dyn DynTimedReplay>, LabError> {
            let (host, platform) = platforms.next::<P::Table>(coherency)?;
            let memory = Rc::clone(&platform.arena);
            let make = parts.make_space(coherency, host);
            let layer = DmaLayer::new(parts.flush(), platform, make);
            let layer = layer.withholding(parts.withholds());
            Ok(Box::new(Copying {
                replay: parts.timed(layer, inspected, Timed),
                memory,
            }))
        };
        Self::undivided(repetitions, &whole)
    }
}
