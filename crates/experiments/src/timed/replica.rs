//! Replicas: timed replays of one subject, one for each repetition. They replay a plan without
//! devices.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_dma::MapError;
use ringfence_dma::flush::{FlushPolicy, Never};
use ringfence_dma::ring::{RingSetup, RingTables, SlotChoice, lay_out};
use ringfence_dma::space::{Identity, Rings};
use ringfence_hw::RingLogic;
use ringfence_lab::LabError;
use ringfence_lab::components::{ModeParts, ReplayTable};
use ringfence_lab::layer::{
    AttachInfo, ContextTarget, DmaLayer, DmaOps, HasPlatform, INSPECTED_BYTES, LayerPlatform,
    PassThrough,
};
use ringfence_lab::mapping_cache::CachedParts;
use ringfence_lab::meter::{
    Clock, FlushFor, FlushForRings, ReplayAlloc, ReplayRing, TimedInvalidationQueue, TimedReplay,
};
use ringfence_lab::mode_dispatch::{IdentityKind, ModeVisitor};
use ringfence_lab::plan::{Plan, TimedStep};
use ringfence_lab::replay_platform::{DATA_BYTES, MEMORY_BYTES};
use ringfence_lab::ring::RingParts;
use ringfence_lab::shadow::{CopyParts, TimedLayerVisitor};
use ringfence_memory::{Arena, ArenaError, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{Nanos, PageSize, PhysAddr, PhysMemory, PhysRange};

use super::steps::Block;

const PAGE: u64 = PageSize::Size4K.bytes();
/// Bytes of memory for the invalidation queue and the tables of a replica.
const TABLE_BYTES: u64 = 256 << 20;
/// Pages before the table frames: the invalidation queue and the word that reports its completion.
const QUEUE_PAGES: u64 = 2;
/// Pages touched in advance, so that no page fault of this process counts as work of the layer.
const WARM_PAGES: u64 = 256;

/// Creates an arena of a number of bytes.
pub(super) type MakeArena<'a> = &'a dyn Fn(u64) -> Result<Arena, ArenaError>;

/// Makes the host back the pages at `addresses`. Ignores addresses outside the arena: the layer
/// refuses their maps.
fn touch(arena: &Arena, addresses: impl Iterator<Item = u64>) {
    for at in addresses {
        if let Ok(word) = arena.word(PhysAddr::new(at)) {
            word.fetch_add(0, Ordering::Relaxed);
        }
    }
}

/// A platform over `arena` whose queue and tables begin at `start`.
fn platform(arena: Arena, start: u64) -> Result<LayerPlatform<TimedInvalidationQueue>, LabError> {
    let arena = Rc::new(arena);
    let page = |number: u64| PhysAddr::new(start + number * PAGE);
    // If the arena ends before this region, the layer refuses maps: tables are out of memory.
    let frames = PhysRange::new(page(QUEUE_PAGES), TABLE_BYTES - QUEUE_PAGES * PAGE)
        .ok_or(LabError::Internal("the region of the table frames"))?;
    touch(&arena, (0..WARM_PAGES).map(|number| page(number).get()));
    // Same type as in the meter's replicas, so both share one monomorphisation.
    Ok(LayerPlatform {
        frames: Rc::new(Frames::new(Rc::clone(&arena), frames)),
        invalidator: TimedInvalidationQueue::new(Rc::clone(&arena), page(0), page(1)),
        arena,
        now: Nanos(0),
    })
}

/// A timed replay of a layer of any type.
pub(super) trait DynReplica: Any {
    /// Allocates everything that the steps of `plan` need.
    fn prepare(&mut self, plan: &Plan) -> Result<(), LabError>;

    /// Performs steps of `plan` as one block of `clock`.
    fn run_block(&mut self, plan: &Plan, steps: &[TimedStep], clock: &mut Clock);

    fn platform(&self) -> &LayerPlatform<TimedInvalidationQueue>;

    /// Returns the number of refused maps and the first error; `None` if the layer refused no map.
    fn refusals(&self) -> Option<(u64, MapError)>;
}

impl<L: DmaOps + HasPlatform<TimedInvalidationQueue> + 'static> DynReplica for TimedReplay<L> {
    fn prepare(&mut self, plan: &Plan) -> Result<(), LabError> {
        TimedReplay::prepare(self, plan)
    }

    fn run_block(&mut self, plan: &Plan, steps: &[TimedStep], clock: &mut Clock) {
        TimedReplay::run_block(self, plan, steps, clock, None);
    }

    fn platform(&self) -> &LayerPlatform<TimedInvalidationQueue> {
        self.layer().platform()
    }

    fn refusals(&self) -> Option<(u64, MapError)> {
        TimedReplay::refusals(self)
    }
}

/// A timed replay of any subject.
pub(super) struct Replica {
    pub(super) replay: Box<dyn DynReplica>,
    /// True if the layer copies the buffers of the plan, whose pages must be present then.
    copies: bool,
}

impl Replica {
    fn new<L: DmaOps + HasPlatform<TimedInvalidationQueue> + 'static>(
        replay: TimedReplay<L>,
    ) -> Self {
        Self {
            replay: Box::new(replay),
            copies: false,
        }
    }

    /// Creates the replica of a layer that copies buffers.
    fn copying<L>(replay: TimedReplay<L>) -> Self
    where
        L: DmaOps + HasPlatform<TimedInvalidationQueue> + 'static,
    {
        Self {
            replay: Box::new(replay),
            copies: true,
        }
    }

    /// Performs the blocks of `plan`. Returns the number of invalidations in those that count, and
    /// leaves their times in `clock`.
    ///
    /// # Errors
    /// Memory is short, or the layer refused a map.
    pub(super) fn drive(
        &mut self,
        plan: &Plan,
        blocks: &[Block],
        clock: &mut Clock,
    ) -> Result<u64, LabError> {
        let Self { replay, copies } = self;
        if *copies {
            let pages = plan.segments.iter().flat_map(|segment| {
                let first = segment.start().align_down(PAGE).get();
                (first..=segment.last().get()).step_by(PAGE as usize)
            });
            touch(&replay.platform().arena, pages);
        }
        replay.prepare(plan)?;
        let mut invalidations = 0;
        let mut discarded = Clock::blocks();
        for block in blocks {
            if !block.counts {
                replay.run_block(plan, block.steps(plan), &mut discarded);
                continue;
            }
            let before = replay.platform().invalidator.requests();
            replay.run_block(plan, block.steps(plan), clock);
            invalidations += replay.platform().invalidator.requests() - before;
        }
        match replay.refusals() {
            None => Ok(invalidations),
            Some((count, first)) => Err(LabError::RefusedMaps { count, first }),
        }
    }
}

/// Makes the replica of a layer with a pool.
struct MakeCopyingReplica;

impl TimedLayerVisitor<TimedInvalidationQueue> for MakeCopyingReplica {
    type Output = Replica;

    fn visit<L: DmaOps + HasPlatform<TimedInvalidationQueue> + 'static>(self, layer: L) -> Replica {
        Replica::copying(TimedReplay::of(Box::new(layer)))
    }
}

/// Visitor that makes a replica of a mode.
pub(super) struct MakeReplica<'a> {
    pub(super) coherency: Coherency,
    pub(super) arena: MakeArena<'a>,
}

impl ModeVisitor for MakeReplica<'_> {
    type Output = Result<Replica, LabError>;

    fn identity(self, kind: IdentityKind) -> Self::Output {
        let make = |of: &AttachInfo, _: &LayerPlatform<TimedInvalidationQueue>| {
            Ok((Identity::new(of.domain), ContextTarget::PassThrough))
        };
        let platform = platform((self.arena)(TABLE_BYTES)?, 0)?;
        let layer = DmaLayer::new(Never, platform, make);
        Ok(if kind.has_generic_path() {
            Replica::new(TimedReplay::of(Box::new(PassThrough::new(layer))))
        } else {
            Replica::new(TimedReplay::of(Box::new(layer)))
        })
    }

    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let make = parts.make_space(self.coherency, None);
        let platform = platform((self.arena)(TABLE_BYTES)?, 0)?;
        let replay = TimedReplay::new((parts.flush)(), platform, make);
        Ok(Replica::new(replay))
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Self::Output {
        Err(LabError::Internal(
            "experiments do not support mapping caches",
        ))
    }

    /// The memory holds the buffers of the plan, above them the tables, and then the pools.
    fn shadow<P: CopyParts>(self, parts: P) -> Self::Output {
        let platform = platform((self.arena)(MEMORY_BYTES)?, DATA_BYTES)?;
        let make = parts.make_space(self.coherency, None);
        let layer = DmaLayer::new(parts.flush(), platform, make);
        Ok(parts.timed(layer, INSPECTED_BYTES, MakeCopyingReplica))
    }

    /// Rejects rings of a trace: experiments use the rings of a port, which [`rings`] makes.
    fn rings<D, L, F>(self, _: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        Err(LabError::Internal(
            "experiments do not support rings of a trace",
        ))
    }
}

/// Slots of a ring's table: the power of two above 2448. At most two buffers for each of 1024
/// descriptors are live, and the two of each packet of a burst of 200 occupy slots until it ends.
const SLOTS: u32 = 4096;

/// A replica whose driver `D` treats each ring of a port as a device with one table. With
/// non-coherent tables, it writes lines back at each doorbell and at the end of each burst.
pub(super) fn rings<D, F>(
    coherency: Coherency,
    arena: MakeArena<'_>,
    flush: F,
) -> Result<Replica, LabError>
where
    D: ReplayRing,
    F: FlushPolicy<Rings<D, RefCell<D>>, u64> + 'static,
{
    let make = move |of: &AttachInfo, platform: &LayerPlatform<TimedInvalidationQueue>| {
        let bytes = RingTables::new(PhysAddr::ZERO, &[SLOTS])?.memory().bytes();
        let base = platform.frames.alloc_contiguous(bytes.div_ceil(PAGE));
        let base = base.map_err(|_| {
            LabError::Internal("the arena has no contiguous frames for a ring table")
        })?;
        let tables = RingTables::new(base, &[SLOTS])?;
        let choice = SlotChoice::Tail;
        let setup = RingSetup { choice, coherency };
        let rings = lay_out(&*platform.arena, &tables, setup)?;
        let space = Rings::<D, RefCell<D>>::new(of.domain, of.device, rings, RefCell::new);
        Ok((space, ContextTarget::Table(base)))
    };
    let platform = platform(arena(TABLE_BYTES)?, 0)?;
    Ok(Replica::new(TimedReplay::new(flush, platform, make)))
}

#[cfg(test)]
pub(super) mod tests;
