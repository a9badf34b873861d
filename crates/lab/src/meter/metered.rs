//! The replicas of one mode, and what they add up to.

use std::rc::Rc;

use ringfence_dma::MapError;
use ringfence_dma::flush::Flush;
use ringfence_dma::space::{Identity, Paged, Rounding, Space};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, Invalidator, Nanos, PhysAddr, PhysMemory, PhysRange};

use super::components::{CONFIGS, Sums, components};
use super::{
    Bench, Clock, Components, FlushFor, Idle, Immediate, InvalidationQueue, NoFind, NullTable,
    Recorded, Replica, Tape, cycles,
};
use crate::build::{Recipe, TableMaker};
use crate::error::LabError;
use crate::plan::Plan;

/// Memory of one replica: tables only, no buffers.
const ARENA: u64 = 256 << 20;
/// Frames touched beforehand, so that no page fault of this process is taken for work of the layer.
const WARM_FRAMES: u64 = 64;

/// The meter of one mode.
pub trait Meter {
    /// Replays one chunk in every replica.
    fn chunk(&mut self, plan: &Plan) -> Result<(), LabError>;
    /// What the chunks so far add up to.
    fn finish(&self) -> Components;
    /// Maps refused by the layer in any replica: their number where it is greatest, and the first.
    fn refusals(&self) -> Option<(u64, MapError)>;
    /// Replays one chunk in one replica, the `config`th of [`CONFIG_NAMES`], inside `measured`: for counting instructions from
    /// outside. `false` if the mode has no such replica.
    fn replay_one(
        &mut self,
        config: usize,
        plan: &Plan,
        measured: &mut dyn FnMut(&mut dyn FnMut()),
    ) -> Result<bool, LabError>;
}

/// A platform for one replica.
fn bench<I>(invalidator: impl FnOnce(&Rc<Arena>) -> I) -> Result<Bench<I>, LabError> {
    let arena = Rc::new(Arena::new(ARENA)?);
    // The first two pages are the invalidation queue's.
    let region = PhysRange::new(PhysAddr::new(0x2000), ARENA - 0x2000)
        .ok_or(LabError::Internal("replica region"))?;
    for page in 0..WARM_FRAMES {
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

fn queued(arena: &Rc<Arena>) -> InvalidationQueue {
    InvalidationQueue::new(Rc::clone(arena), PhysAddr::new(0), PhysAddr::new(0x1000))
}

fn immediate(_: &Rc<Arena>) -> Immediate {
    Immediate
}

/// A replica that can be driven without knowing its types.
trait Driven {
    fn prepare(&mut self, plan: &Plan) -> Result<(), LabError>;
    fn drive(&mut self, plan: &Plan, clock: &mut Clock, tape: Option<&Tape>);
    fn refusals(&self) -> Option<(u64, MapError)> {
        None
    }
}

impl<S: Space, F: Flush<S, u64>, I: Invalidator> Driven for Replica<S, F, I> {
    fn prepare(&mut self, plan: &Plan) -> Result<(), LabError> {
        Replica::prepare(self, plan)
    }

    fn drive(&mut self, plan: &Plan, clock: &mut Clock, tape: Option<&Tape>) {
        self.run(plan, clock, tape);
    }

    fn refusals(&self) -> Option<(u64, MapError)> {
        Replica::refusals(self)
    }
}

impl Driven for Idle {
    fn prepare(&mut self, _plan: &Plan) -> Result<(), LabError> {
        Ok(())
    }

    fn drive(&mut self, plan: &Plan, clock: &mut Clock, _tape: Option<&Tape>) {
        self.run(plan, clock);
    }
}

/// Replays that have tables, for each repetition: four configurations, once for blocks and once for runs.
pub(crate) const TIMED_REPLAYS: u64 = 8;

/// The replicas of a meter, in the order of their sums.
pub const CONFIG_NAMES: [&str; CONFIGS] = ["full", "no_find", "a", "at", "ati", "i", "it", "idle"];

/// One replica of each configuration, in the order of [`CONFIG_NAMES`]. Identity modes have fewer.
struct Set {
    replicas: [Option<Box<dyn Driven>>; CONFIGS],
}

/// All sets of a mode.
pub struct Sets {
    tape: Rc<Tape>,
    /// Records what the others play.
    scout: Box<dyn Driven>,
    probed: Vec<Set>,
    timed: Vec<Set>,
    whole: Sums,
    maps: Sums,
    unmaps: Sums,
    spread: (f64, f64),
    map_count: u64,
    unmap_count: u64,
    chunks: usize,
    overhead: u64,
}

impl Sets {
    fn new(
        repetitions: usize,
        tape: Rc<Tape>,
        scout: Box<dyn Driven>,
        mut set: impl FnMut() -> Result<Set, LabError>,
    ) -> Result<Self, LabError> {
        let mut sets =
            || -> Result<Vec<Set>, LabError> { (0..repetitions.max(1)).map(|_| set()).collect() };
        let timed = sets()?;
        let probed = sets()?;
        Ok(Self {
            tape,
            scout,
            probed,
            timed,
            whole: [0.0; CONFIGS],
            maps: [0.0; CONFIGS],
            unmaps: [0.0; CONFIGS],
            spread: (0.0, 0.0),
            map_count: 0,
            unmap_count: 0,
            chunks: 0,
            overhead: clock_overhead(),
        })
    }

    /// The meter of a mode with an allocator and a table.
    pub fn paged<A, T, F>(
        recipe: Recipe<A, T, F>,
        coherency: Coherency,
        repetitions: usize,
    ) -> Result<Self, LabError>
    where
        A: ringfence_iova::IovaAllocator + 'static,
        T: TableMaker,
        F: FlushFor<A, T> + 'static,
    {
        let tape = Rc::new(Tape::default());
        let site = Site {
            rounding: recipe.rounding,
            coherency,
        };
        let alloc = move |memory: &Memory, frames: &TableFrames, table: Option<&T>| {
            recipe.allocator(memory, frames, table)
        };
        let no_find = move |memory: &Memory, frames: &TableFrames, table: Option<&T>| {
            alloc(memory, frames, table).map(NoFind)
        };
        let recorded = {
            let tape = Rc::clone(&tape);
            move |_: &Memory, _: &TableFrames, _: Option<&T>| {
                Ok(Recorded::<A::Returned>::new(Rc::clone(&tape)))
            }
        };
        let flush = recipe.flush;
        let scout = replica(flush, alloc, site, queued)?;
        Self::new(repetitions, Rc::clone(&tape), scout, || {
            let tape = || recorded.clone();
            Ok(Set {
                replicas: [
                    Some(replica(flush, alloc, site, queued)?),
                    Some(replica(flush, no_find, site, queued)?),
                    Some(replica(flush, tape(), site, queued)?),
                    Some(untabled(flush, tape(), site, queued)?),
                    Some(untabled(flush, tape(), site, immediate)?),
                    Some(replica(flush, alloc, site, immediate)?),
                    Some(untabled(flush, alloc, site, immediate)?),
                    Some(Box::new(Idle::default())),
                ],
            })
        })
    }

    /// The meter of a mode without an allocator: nothing can be taken away but the whole.
    pub fn identity<F>(flush: fn() -> F, repetitions: usize) -> Result<Self, LabError>
    where
        F: Flush<Identity, u64> + 'static,
    {
        let whole = move || -> Result<Box<dyn Driven>, LabError> {
            let make = |domain: DomainId, _: &Bench<Immediate>| Ok(Identity::new(domain));
            Ok(Box::new(Replica::new(flush(), bench(immediate)?, make)))
        };
        Self::new(repetitions, Rc::new(Tape::default()), whole()?, || {
            let mut replicas: [Option<Box<dyn Driven>>; CONFIGS] = Default::default();
            replicas[0] = Some(whole()?);
            replicas[CONFIGS - 1] = Some(Box::new(Idle::default()));
            Ok(Set { replicas })
        })
    }
}

type Memory = Rc<Arena>;
type TableFrames = Frames<Rc<Arena>>;

/// What the spaces of all replicas of a mode have in common.
#[derive(Clone, Copy)]
struct Site {
    rounding: Rounding,
    coherency: Coherency,
}

fn replica<A, T, F, I>(
    flush: fn() -> F,
    alloc: impl Fn(&Memory, &TableFrames, Option<&T>) -> Result<A, LabError> + 'static,
    site: Site,
    invalidator: fn(&Memory) -> I,
) -> Result<Box<dyn Driven>, LabError>
where
    A: ringfence_iova::IovaAllocator + 'static,
    T: TableMaker,
    F: Flush<Paged<A, T>, u64> + 'static,
    I: Invalidator + 'static,
{
    let make = move |domain: DomainId, bench: &Bench<I>| {
        let (memory, frames) = (&bench.arena, &bench.frames);
        let table = T::make(domain, site.coherency, memory, frames)?;
        let alloc = alloc(memory, frames, Some(&table))?;
        Ok(Paged::new(alloc, table, site.rounding))
    };
    Ok(Box::new(Replica::new(flush(), bench(invalidator)?, make)))
}

/// A replica without a table; the allocator is that of a space with a table `T`.
fn untabled<A, T, F, I>(
    flush: fn() -> F,
    alloc: impl Fn(&Memory, &TableFrames, Option<&T>) -> Result<A, LabError> + 'static,
    site: Site,
    invalidator: fn(&Memory) -> I,
) -> Result<Box<dyn Driven>, LabError>
where
    A: ringfence_iova::IovaAllocator + 'static,
    T: TableMaker,
    F: Flush<Paged<A, NullTable>, u64> + 'static,
    I: Invalidator + 'static,
{
    let make = move |domain: DomainId, bench: &Bench<I>| {
        let alloc = alloc(&bench.arena, &bench.frames, None)?;
        Ok(Paged::new(alloc, NullTable(domain), site.rounding))
    };
    Ok(Box::new(Replica::new(flush(), bench(invalidator)?, make)))
}

/// What reading the clock twice in a row costs.
fn clock_overhead() -> u64 {
    (0..64)
        .map(|_| {
            let before = cycles();
            cycles().saturating_sub(before)
        })
        .min()
        .unwrap_or(0)
}

/// The median over repetitions of each block, summed over blocks.
fn sum_of_medians(repetitions: &[Vec<u64>]) -> f64 {
    let blocks = repetitions.iter().map(Vec::len).min().unwrap_or(0);
    let mut column = Vec::with_capacity(repetitions.len());
    let mut sum = 0.0;
    for block in 0..blocks {
        column.clear();
        column.extend(repetitions.iter().map(|times| times[block]));
        column.sort_unstable();
        let middle = column.len() / 2;
        sum += if column.len() % 2 == 0 {
            (column[middle - 1] + column[middle]) as f64 / 2.0
        } else {
            column[middle] as f64
        };
    }
    sum
}

impl Meter for Sets {
    fn replay_one(
        &mut self,
        config: usize,
        plan: &Plan,
        measured: &mut dyn FnMut(&mut dyn FnMut()),
    ) -> Result<bool, LabError> {
        self.tape.erase();
        self.scout.prepare(plan)?;
        self.scout
            .drive(plan, &mut Clock::blocks(), Some(&self.tape));
        self.tape.rewind();
        let replica = self
            .timed
            .first_mut()
            .and_then(|set| set.replicas.get_mut(config)?.as_mut());
        let Some(replica) = replica else {
            return Ok(false);
        };
        replica.prepare(plan)?;
        let mut clock = Clock::blocks();
        measured(&mut || replica.drive(plan, &mut clock, None));
        Ok(true)
    }

    fn chunk(&mut self, plan: &Plan) -> Result<(), LabError> {
        if plan.steps.is_empty() {
            return Ok(());
        }
        self.map_count += plan.maps;
        self.unmap_count += plan.unmaps;
        self.tape.erase();
        self.scout.prepare(plan)?;
        self.scout
            .drive(plan, &mut Clock::blocks(), Some(&self.tape));
        let turns = |repetition: usize, chunk: usize| {
            // Another one comes first each time, so that no configuration always finds the caches as its neighbour left them.
            (0..CONFIGS).map(move |turn| (turn + repetition * 3 + chunk) % CONFIGS)
        };
        let mut times = [const { Vec::new() }; CONFIGS];
        for (repetition, set) in self.timed.iter_mut().enumerate() {
            for config in turns(repetition, self.chunks) {
                if let Some(replica) = &mut set.replicas[config] {
                    replica.prepare(plan)?;
                    self.tape.rewind();
                    let mut clock = Clock::blocks();
                    replica.drive(plan, &mut clock, None);
                    times[config].push(clock.blocks);
                }
            }
        }
        let mut maps = [const { Vec::new() }; CONFIGS];
        let mut unmaps = [const { Vec::new() }; CONFIGS];
        for (repetition, set) in self.probed.iter_mut().enumerate() {
            for config in turns(repetition, self.chunks) {
                if let Some(replica) = &mut set.replicas[config] {
                    replica.prepare(plan)?;
                    self.tape.rewind();
                    let mut clock = Clock::runs(self.overhead);
                    replica.drive(plan, &mut clock, None);
                    maps[config].push(clock.in_maps);
                    unmaps[config].push(clock.in_unmaps);
                }
            }
        }
        for config in 0..CONFIGS {
            self.whole[config] += sum_of_medians(&times[config]);
            self.maps[config] += sum_of_medians(&maps[config]);
            self.unmaps[config] += sum_of_medians(&unmaps[config]);
        }
        let sums = times[0].iter().map(|blocks| blocks.iter().sum::<u64>());
        self.spread.0 += sums.clone().min().unwrap_or(0) as f64;
        self.spread.1 += sums.max().unwrap_or(0) as f64;
        self.chunks += 1;
        Ok(())
    }

    fn refusals(&self) -> Option<(u64, MapError)> {
        let sets = self.timed.iter().chain(&self.probed);
        let replicas = sets.flat_map(|set| set.replicas.iter().flatten());
        // The scout first: what it refuses the recorded allocators refuse as well, in their own words.
        let all = std::iter::once(&self.scout).chain(replicas);
        let refusals = all.filter_map(|replica| replica.refusals());
        refusals.reduce(|one, other| if other.0 > one.0 { other } else { one })
    }

    fn finish(&self) -> Components {
        // Identity has only the whole and the idle loop: the whole is "other".
        let partial = self.timed.iter().all(|set| set.replicas[2].is_none());
        let sums = |of: &Sums| match *of {
            [full, .., idle] if partial => [full, full, full, full, full, full, full, idle],
            all => all,
        };
        let mut found = components(
            &sums(&self.whole),
            &sums(&self.maps),
            &sums(&self.unmaps),
            self.map_count,
            self.unmap_count,
        );
        if self.whole[0] > 0.0 {
            found.repetition_spread = (self.spread.1 - self.spread.0) / self.whole[0];
        }
        found
    }
}
