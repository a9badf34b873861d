//! The timed replays of a mode as objects without static types.

use std::rc::Rc;

use ringfence_dma::MapError;
use ringfence_dma::flush::Flush;
use ringfence_dma::space::{Paged, Rings, Rounding, Space};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{Invalidator, Nanos, PhysAddr, PhysMemory, PhysRange};

use super::{
    AllocTrace, Clock, EmptyLoop, FlushForRings, FreeInvalidator, InvalidationQueue, NullTable,
    PlanResources, ReplayRing, ReplayedRings, TimedPlatform, TimedReplay,
};
use crate::error::LabError;
use crate::hardware::Host;
use crate::mode_dispatch::{HostOf, MakeTable, ReplayTable, ThreadCell};
use crate::plan::Plan;
use crate::replay::AttachInfo;
use crate::ring::{RingParts, RingSizes};

/// Memory of one timed replay: tables only, no buffers.
const ARENA: u64 = 256 << 20;
/// Frames that are touched in advance, so that page faults of this process do not count as work of
/// the layer.
const WARM_FRAMES: u64 = 64;
/// Frames of the invalidation queue, the first ones of the memory.
const QUEUE_FRAMES: u64 = 2;

/// Creates a platform for one timed replay.
pub(crate) fn timed_platform<I>(
    invalidator: impl FnOnce(&Rc<Arena>) -> I,
) -> Result<TimedPlatform<I>, LabError> {
    warmed_platform(WARM_FRAMES, invalidator)
}

/// Creates a platform for one timed replay without tables.
pub(super) fn queue_platform<I>(
    invalidator: impl FnOnce(&Rc<Arena>) -> I,
) -> Result<TimedPlatform<I>, LabError> {
    warmed_platform(QUEUE_FRAMES, invalidator)
}

fn warmed_platform<I>(
    warm: u64,
    invalidator: impl FnOnce(&Rc<Arena>) -> I,
) -> Result<TimedPlatform<I>, LabError> {
    let arena = Rc::new(Arena::new(ARENA)?);
    let queue = QUEUE_FRAMES << 12;
    let region = PhysRange::new(PhysAddr::new(queue), ARENA - queue)
        .ok_or(LabError::Internal("replica region"))?;
    for page in 0..warm {
        if let Ok(word) = arena.word(PhysAddr::new(page << 12)) {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let frames = Frames::new(Rc::clone(&arena), region);
    let invalidator = invalidator(&arena);
    Ok(TimedPlatform {
        arena,
        frames,
        invalidator,
        now: Nanos(0),
    })
}

pub(crate) fn invalidation_queue(arena: &Rc<Arena>) -> InvalidationQueue {
    InvalidationQueue::new(Rc::clone(arena), PhysAddr::new(0), PhysAddr::new(0x1000))
}

pub(crate) fn free_invalidator(_: &Rc<Arena>) -> FreeInvalidator {
    FreeInvalidator
}

/// Creates a platform with an invalidation queue, for the host of a timed replay.
pub(crate) fn host_platform() -> Result<TimedPlatform<InvalidationQueue>, LabError> {
    timed_platform(invalidation_queue)
}

/// Creates the invalidator of a timed replay with a table, and the host that owns the table; `None`
/// if the layer owns it.
pub(super) type MakeInvalidator<T, I> =
    fn(&Memory, Coherency) -> Result<(Option<HostOf<T>>, I), LabError>;

/// Creates a stub invalidator. Not for tables that a host owns: the stub does not reach the host.
pub(super) fn no_invalidator<T: ReplayTable>(
    _: &Memory,
    _: Coherency,
) -> Result<(Option<HostOf<T>>, FreeInvalidator), LabError> {
    Ok((None, FreeInvalidator))
}

/// The host, or `None`, and the invalidator with which the layer waits for it.
type HostAndInvalidator<H> = (Option<H>, <H as Host>::Invalidator);

/// Creates the host and the invalidator of the mode itself.
pub(super) fn mode_invalidator<T: ReplayTable>(
    memory: &Memory,
    coherency: Coherency,
) -> Result<HostAndInvalidator<HostOf<T>>, LabError> {
    HostOf::<T>::for_meter(memory, coherency)
}

/// A timed replay without static types.
pub(crate) trait DynTimedReplay {
    fn prepare_for(&mut self, needs: &PlanResources) -> Result<(), LabError>;
    fn run_plan(&mut self, plan: &Plan, clock: &mut Clock, tape: Option<&AllocTrace>);
    fn refusals(&self) -> Option<(u64, MapError)> {
        None
    }
    /// Returns the numbers of maps and unmaps in the trace that did not happen for lack of a slot.
    fn stalled_out(&self) -> (u64, u64) {
        (0, 0)
    }
}

impl<S: Space, F: Flush<S, u64>, I: Invalidator> DynTimedReplay for TimedReplay<S, F, I> {
    fn prepare_for(&mut self, needs: &PlanResources) -> Result<(), LabError> {
        TimedReplay::provide(self, needs)
    }

    fn run_plan(&mut self, plan: &Plan, clock: &mut Clock, tape: Option<&AllocTrace>) {
        self.run(plan, clock, tape);
    }

    fn refusals(&self) -> Option<(u64, MapError)> {
        TimedReplay::refusals(self)
    }

    fn stalled_out(&self) -> (u64, u64) {
        TimedReplay::stalled_out(self)
    }
}

impl DynTimedReplay for EmptyLoop {
    fn prepare_for(&mut self, _needs: &PlanResources) -> Result<(), LabError> {
        Ok(())
    }

    fn run_plan(&mut self, plan: &Plan, clock: &mut Clock, _tape: Option<&AllocTrace>) {
        self.run(plan, clock);
    }
}

pub(super) type Memory = Rc<Arena>;
pub(super) type TableFrames = Frames<Rc<Arena>>;

/// Common inputs for the spaces of a mode's timed replays.
pub(super) struct SpaceEnv<T: ReplayTable> {
    pub(super) rounding: Rounding,
    pub(super) coherency: Coherency,
    pub(super) table: MakeTable<T>,
}

impl<T: ReplayTable> Clone for SpaceEnv<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ReplayTable> Copy for SpaceEnv<T> {}

pub(super) fn replica<A, T, F, I>(
    flush: fn() -> F,
    alloc: impl Fn(&Memory, &TableFrames, Option<&T>) -> Result<A, LabError> + 'static,
    site: SpaceEnv<T>,
    answers: MakeInvalidator<T, I>,
) -> Result<Box<dyn DynTimedReplay>, LabError>
where
    A: ringfence_iova::IovaAllocator + 'static,
    T: ReplayTable,
    F: Flush<Paged<A, T>, u64> + 'static,
    I: Invalidator + 'static,
{
    let TimedPlatform {
        arena, frames, now, ..
    } = timed_platform(free_invalidator)?;
    let (host, invalidator) = answers(&arena, site.coherency)?;
    let bench = TimedPlatform {
        arena,
        frames,
        invalidator,
        now,
    };
    let make = move |of: &AttachInfo, bench: &TimedPlatform<I>| {
        let (memory, frames) = (&bench.arena, &bench.frames);
        let table = (site.table)(of.domain, site.coherency, memory, frames, host.as_ref())?;
        let alloc = alloc(memory, frames, Some(&table))?;
        Ok(Paged::new(alloc, table, site.rounding))
    };
    Ok(Box::new(TimedReplay::new(flush(), bench, make)))
}

/// Creates a timed replay without a table. The allocator is that of a space with a table `T`.
pub(super) fn without_table<A, T, F, I>(
    flush: fn() -> F,
    alloc: impl Fn(&Memory, &TableFrames, Option<&T>) -> Result<A, LabError> + 'static,
    site: SpaceEnv<T>,
    invalidator: fn(&Memory) -> I,
) -> Result<Box<dyn DynTimedReplay>, LabError>
where
    A: ringfence_iova::IovaAllocator + 'static,
    T: ReplayTable,
    F: Flush<Paged<A, NullTable>, u64> + 'static,
    I: Invalidator + 'static,
{
    let make = move |of: &AttachInfo, bench: &TimedPlatform<I>| {
        let alloc = alloc(&bench.arena, &bench.frames, None)?;
        Ok(Paged::new(alloc, NullTable(of.domain), site.rounding))
    };
    Ok(Box::new(TimedReplay::new(
        flush(),
        queue_platform(invalidator)?,
        make,
    )))
}

/// Creates a timed replay with rings.
pub(super) fn with_rings<D, L, F, I>(
    recipe: RingParts<D, L, F>,
    sizes: &RingSizes,
    invalidator: fn(&Memory) -> I,
) -> Result<Box<dyn DynTimedReplay>, LabError>
where
    D: ReplayRing,
    L: 'static,
    F: FlushForRings<D> + 'static,
    I: Invalidator + 'static,
{
    let sizes = sizes.clone();
    let make = move |of: &AttachInfo, bench: &TimedPlatform<I>| {
        let made = recipe.space(of, &sizes, &bench.arena, &bench.frames);
        made.map(|(space, _)| space)
    };
    let flush: F = (recipe.flush)();
    let bench = timed_platform(invalidator)?;
    Ok(Box::new(TimedReplay::<Rings<D, ThreadCell<D>>, F, I>::new(
        flush, bench, make,
    )))
}

/// Creates a timed replay whose slots come from `tape`, with or without entries.
pub(super) fn with_replayed_rings<D, L, F, I, const ENTRIES: bool>(
    recipe: RingParts<D, L, F>,
    sizes: &RingSizes,
    tape: &Rc<AllocTrace>,
    invalidator: fn(&Memory) -> I,
) -> Result<Box<dyn DynTimedReplay>, LabError>
where
    D: ReplayRing,
    L: 'static,
    F: Flush<ReplayedRings<D, ENTRIES>, u64> + 'static,
    I: Invalidator + 'static,
{
    let (sizes, tape) = (sizes.clone(), Rc::clone(tape));
    let make = move |of: &AttachInfo, bench: &TimedPlatform<I>| {
        let (memory, frames) = (&bench.arena, &bench.frames);
        let (_, rings) = recipe.space(of, &sizes, memory, frames)?;
        ReplayedRings::new(of, recipe.setup.coherency, rings, memory, Rc::clone(&tape))
    };
    let flush: F = (recipe.flush)();
    let bench = timed_platform(invalidator)?;
    Ok(Box::new(
        TimedReplay::<ReplayedRings<D, ENTRIES>, F, I>::new(flush, bench, make),
    ))
}
