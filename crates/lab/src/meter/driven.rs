//! The replicas of a mode, each as an object that is driven without knowing its types.

use std::rc::Rc;

use ringfence_dma::MapError;
use ringfence_dma::flush::Flush;
use ringfence_dma::space::{Paged, Rings, Rounding, Space};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{Invalidator, Nanos, PhysAddr, PhysMemory, PhysRange};

use super::{
    Bench, Clock, FlushForRings, Idle, Immediate, InvalidationQueue, Needs, NullTable, ReplayRing,
    Replica, Tape, TapedRings,
};
use crate::build::{HostOf, MakeTable, ReplayTable, Single};
use crate::error::LabError;
use crate::hardware::Host;
use crate::plan::Plan;
use crate::replay::Newcomer;
use crate::ring::{RingRecipe, RingSizes};

/// Memory of one replica: tables only, no buffers.
const ARENA: u64 = 256 << 20;
/// Frames touched beforehand, so that no page fault of this process is taken for work of the layer.
const WARM_FRAMES: u64 = 64;
/// Those of the invalidation queue, which are the first.
const QUEUE_FRAMES: u64 = 2;

/// A platform for one replica.
pub(crate) fn bench<I>(invalidator: impl FnOnce(&Rc<Arena>) -> I) -> Result<Bench<I>, LabError> {
    warmed(WARM_FRAMES, invalidator)
}

/// A platform for one replica without tables.
pub(super) fn bare_bench<I>(
    invalidator: impl FnOnce(&Rc<Arena>) -> I,
) -> Result<Bench<I>, LabError> {
    warmed(QUEUE_FRAMES, invalidator)
}

fn warmed<I>(warm: u64, invalidator: impl FnOnce(&Rc<Arena>) -> I) -> Result<Bench<I>, LabError> {
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
    Ok(Bench {
        arena,
        frames,
        invalidator,
        now: Nanos(0),
    })
}

pub(crate) fn queued(arena: &Rc<Arena>) -> InvalidationQueue {
    InvalidationQueue::new(Rc::clone(arena), PhysAddr::new(0), PhysAddr::new(0x1000))
}

pub(crate) fn immediate(_: &Rc<Arena>) -> Immediate {
    Immediate
}

/// A platform with an invalidation queue, for a host's side of a replica.
pub(crate) fn replica_bench() -> Result<Bench<InvalidationQueue>, LabError> {
    bench(queued)
}

/// How a replica with a table waits for invalidations, and who keeps the table if it is not the layer.
pub(super) type Answers<T, I> = fn(&Memory, Coherency) -> Result<(Option<HostOf<T>>, I), LabError>;

/// No table that a host keeps is invalidated by a stub: the host would not know of it.
pub(super) fn stubbed<T: ReplayTable>(
    _: &Memory,
    _: Coherency,
) -> Result<(Option<HostOf<T>>, Immediate), LabError> {
    Ok((None, Immediate))
}

/// A host, if there is one, and how the layer waits for it.
type Metered<H> = (Option<H>, <H as Host>::Invalidator);

/// As in the mode.
pub(super) fn answered<T: ReplayTable>(
    memory: &Memory,
    coherency: Coherency,
) -> Result<Metered<HostOf<T>>, LabError> {
    HostOf::<T>::metered(memory, coherency)
}

/// A replica that can be driven without knowing its types.
pub(crate) trait Driven {
    fn provide(&mut self, needs: &Needs) -> Result<(), LabError>;
    fn drive(&mut self, plan: &Plan, clock: &mut Clock, tape: Option<&Tape>);
    fn refusals(&self) -> Option<(u64, MapError)> {
        None
    }
    /// Maps and unmaps of the trace that were none, for want of a slot.
    fn stalled_out(&self) -> (u64, u64) {
        (0, 0)
    }
}

impl<S: Space, F: Flush<S, u64>, I: Invalidator> Driven for Replica<S, F, I> {
    fn provide(&mut self, needs: &Needs) -> Result<(), LabError> {
        Replica::provide(self, needs)
    }

    fn drive(&mut self, plan: &Plan, clock: &mut Clock, tape: Option<&Tape>) {
        self.run(plan, clock, tape);
    }

    fn refusals(&self) -> Option<(u64, MapError)> {
        Replica::refusals(self)
    }

    fn stalled_out(&self) -> (u64, u64) {
        Replica::stalled_out(self)
    }
}

impl Driven for Idle {
    fn provide(&mut self, _needs: &Needs) -> Result<(), LabError> {
        Ok(())
    }

    fn drive(&mut self, plan: &Plan, clock: &mut Clock, _tape: Option<&Tape>) {
        self.run(plan, clock);
    }
}

pub(super) type Memory = Rc<Arena>;
pub(super) type TableFrames = Frames<Rc<Arena>>;

/// What the spaces of all replicas of a mode have in common.
pub(super) struct Site<T: ReplayTable> {
    pub(super) rounding: Rounding,
    pub(super) coherency: Coherency,
    pub(super) table: MakeTable<T>,
}

impl<T: ReplayTable> Clone for Site<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ReplayTable> Copy for Site<T> {}

pub(super) fn replica<A, T, F, I>(
    flush: fn() -> F,
    alloc: impl Fn(&Memory, &TableFrames, Option<&T>) -> Result<A, LabError> + 'static,
    site: Site<T>,
    answers: Answers<T, I>,
) -> Result<Box<dyn Driven>, LabError>
where
    A: ringfence_iova::IovaAllocator + 'static,
    T: ReplayTable,
    F: Flush<Paged<A, T>, u64> + 'static,
    I: Invalidator + 'static,
{
    let Bench {
        arena, frames, now, ..
    } = bench(immediate)?;
    let (host, invalidator) = answers(&arena, site.coherency)?;
    let bench = Bench {
        arena,
        frames,
        invalidator,
        now,
    };
    let make = move |of: &Newcomer, bench: &Bench<I>| {
        let (memory, frames) = (&bench.arena, &bench.frames);
        let table = (site.table)(of.domain, site.coherency, memory, frames, host.as_ref())?;
        let alloc = alloc(memory, frames, Some(&table))?;
        Ok(Paged::new(alloc, table, site.rounding))
    };
    Ok(Box::new(Replica::new(flush(), bench, make)))
}

/// A replica without a table; the allocator is that of a space with a table `T`.
pub(super) fn untabled<A, T, F, I>(
    flush: fn() -> F,
    alloc: impl Fn(&Memory, &TableFrames, Option<&T>) -> Result<A, LabError> + 'static,
    site: Site<T>,
    invalidator: fn(&Memory) -> I,
) -> Result<Box<dyn Driven>, LabError>
where
    A: ringfence_iova::IovaAllocator + 'static,
    T: ReplayTable,
    F: Flush<Paged<A, NullTable>, u64> + 'static,
    I: Invalidator + 'static,
{
    let make = move |of: &Newcomer, bench: &Bench<I>| {
        let alloc = alloc(&bench.arena, &bench.frames, None)?;
        Ok(Paged::new(alloc, NullTable(of.domain), site.rounding))
    };
    Ok(Box::new(Replica::new(
        flush(),
        bare_bench(invalidator)?,
        make,
    )))
}

/// A replica with rings.
pub(super) fn ringed<D, L, F, I>(
    recipe: RingRecipe<D, L, F>,
    sizes: &RingSizes,
    invalidator: fn(&Memory) -> I,
) -> Result<Box<dyn Driven>, LabError>
where
    D: ReplayRing,
    L: 'static,
    F: FlushForRings<D> + 'static,
    I: Invalidator + 'static,
{
    let sizes = sizes.clone();
    let make = move |of: &Newcomer, bench: &Bench<I>| {
        let made = recipe.space(of, &sizes, &bench.arena, &bench.frames);
        made.map(|(space, _)| space)
    };
    let flush: F = (recipe.flush)();
    let bench = bench(invalidator)?;
    Ok(Box::new(Replica::<Rings<D, Single<D>>, F, I>::new(
        flush, bench, make,
    )))
}

/// A replica whose slots come from `tape`, with or without entries.
pub(super) fn taped<D, L, F, I, const ENTRIES: bool>(
    recipe: RingRecipe<D, L, F>,
    sizes: &RingSizes,
    tape: &Rc<Tape>,
    invalidator: fn(&Memory) -> I,
) -> Result<Box<dyn Driven>, LabError>
where
    D: ReplayRing,
    L: 'static,
    F: Flush<TapedRings<D, ENTRIES>, u64> + 'static,
    I: Invalidator + 'static,
{
    let (sizes, tape) = (sizes.clone(), Rc::clone(tape));
    let make = move |of: &Newcomer, bench: &Bench<I>| {
        let (memory, frames) = (&bench.arena, &bench.frames);
        let (_, rings) = recipe.space(of, &sizes, memory, frames)?;
        TapedRings::new(of, recipe.setup.coherency, rings, memory, Rc::clone(&tape))
    };
    let flush: F = (recipe.flush)();
    let bench = bench(invalidator)?;
    Ok(Box::new(Replica::<TapedRings<D, ENTRIES>, F, I>::new(
        flush, bench, make,
    )))
}
