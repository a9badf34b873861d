//! The replicas of one mode, and what they add up to.

use std::rc::Rc;

use ringfence_dma::MapError;
use ringfence_dma::flush::Flush;
use ringfence_dma::space::Identity;
use ringfence_pgtable::Coherency;

use super::components::{CONFIGS, Second, Sums, components};
use super::driven::{
    Driven, Memory, Site, TableFrames, answered, bench, immediate, queued, replica, ringed,
    stubbed, taped, untabled,
};
use super::{
    Bench, Clock, Components, FlushFor, FlushForRings, Idle, Immediate, Needs, ReplayAlloc,
    ReplayRing, Replica, Tape, cycles,
};
use crate::build::{HostOf, Recipe, ReplayTable};
use crate::error::LabError;
use crate::hardware::Host;
use crate::plan::Plan;
use crate::replay::Newcomer;
use crate::ring::{RingRecipe, RingSizes};

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

/// Replays that have tables, for each repetition: four configurations, once for blocks and once for runs.
pub(crate) const TIMED_REPLAYS: u64 = 8;

/// The replicas of a meter, in the order of their sums.
pub const CONFIG_NAMES: [&str; CONFIGS] = ["full", "no_find", "a", "at", "ati", "i", "it", "idle"];

/// One replica of each configuration, in the order of [`CONFIG_NAMES`]. Identity modes have fewer.
pub(crate) struct Set {
    pub(crate) replicas: [Option<Box<dyn Driven>>; CONFIGS],
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
    without: Second,
}

impl Sets {
    pub(crate) fn new(
        repetitions: usize,
        tape: Rc<Tape>,
        scout: Box<dyn Driven>,
        set: &mut dyn FnMut() -> Result<Set, LabError>,
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
            without: Second::Table,
        })
    }

    /// The meter of a mode with an allocator and a table.
    pub fn paged<A, T, F>(
        recipe: Recipe<A, T, F>,
        coherency: Coherency,
        repetitions: usize,
    ) -> Result<Self, LabError>
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let tape = Rc::new(Tape::default());
        let site = Site {
            rounding: recipe.rounding,
            coherency,
            table: recipe.table,
        };
        let alloc = move |memory: &Memory, frames: &TableFrames, table: Option<&T>| {
            recipe.allocator(memory, frames, table)
        };
        let no_find = move |memory: &Memory, frames: &TableFrames, table: Option<&T>| {
            alloc(memory, frames, table).map(A::without_find)
        };
        let recorded = {
            let tape = Rc::clone(&tape);
            move |_: &Memory, _: &TableFrames, _: Option<&T>| Ok(A::recorded(Rc::clone(&tape)))
        };
        let flush = recipe.flush;
        let scout = replica(flush, alloc, site, answered::<T>)?;
        // A host invalidates what it unmaps before it answers: the layer's own invalidation is nothing that could be taken away. Asked
        // where it decides, so that what there is not is not compiled.
        Self::new(repetitions, Rc::clone(&tape), scout, &mut || {
            let tape = || recorded.clone();
            Ok(Set {
                replicas: [
                    Some(replica(flush, alloc, site, answered::<T>)?),
                    if A::FINDS {
                        Some(replica(flush, no_find, site, answered::<T>)?)
                    } else {
                        None
                    },
                    Some(replica(flush, tape(), site, answered::<T>)?),
                    if HostOf::<T>::REMOTE {
                        None
                    } else {
                        Some(untabled(flush, tape(), site, queued)?)
                    },
                    Some(untabled(flush, tape(), site, immediate)?),
                    if HostOf::<T>::REMOTE {
                        None
                    } else {
                        Some(replica(flush, alloc, site, stubbed::<T>)?)
                    },
                    Some(untabled(flush, alloc, site, immediate)?),
                    Some(Box::new(Idle::default())),
                ],
            })
        })
    }

    /// The meter of a mode with rings.
    pub fn rings<D, L, F>(
        recipe: RingRecipe<D, L, F>,
        sizes: &RingSizes,
        repetitions: usize,
    ) -> Result<Self, LabError>
    where
        D: ReplayRing,
        L: 'static,
        F: FlushForRings<D> + 'static,
    {
        let tape = Rc::new(Tape::default());
        let scout = ringed(recipe, sizes, queued)?;
        let mut sets = Self::new(repetitions, Rc::clone(&tape), scout, &mut || {
            Ok(Set {
                replicas: [
                    Some(ringed(recipe, sizes, queued)?),
                    None,
                    Some(taped::<_, _, _, _, true>(recipe, sizes, &tape, queued)?),
                    Some(taped::<_, _, _, _, false>(recipe, sizes, &tape, queued)?),
                    Some(taped::<_, _, _, _, false>(recipe, sizes, &tape, immediate)?),
                    Some(ringed(recipe, sizes, immediate)?),
                    Some(taped::<_, _, _, _, true>(recipe, sizes, &tape, immediate)?),
                    Some(Box::new(Idle::default())),
                ],
            })
        })?;
        sets.without = Second::Allocator;
        Ok(sets)
    }

    /// The meter of a mode without an allocator: nothing can be taken away but the whole.
    pub fn identity<F>(flush: fn() -> F, repetitions: usize) -> Result<Self, LabError>
    where
        F: Flush<Identity, u64> + 'static,
    {
        let whole = move || -> Result<Box<dyn Driven>, LabError> {
            let make = |of: &Newcomer, _: &Bench<Immediate>| Ok(Identity::new(of.domain));
            Ok(Box::new(Replica::new(flush(), bench(immediate)?, make)))
        };
        Self::new(repetitions, Rc::new(Tape::default()), whole()?, &mut || {
            let mut replicas: [Option<Box<dyn Driven>>; CONFIGS] = Default::default();
            replicas[0] = Some(whole()?);
            replicas[CONFIGS - 1] = Some(Box::new(Idle::default()));
            Ok(Set { replicas })
        })
    }
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
        let needs = Needs::of(plan);
        self.scout.provide(&needs)?;
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
        replica.provide(&needs)?;
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
        let needs = Needs::of(plan);
        self.scout.provide(&needs)?;
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
                    replica.provide(&needs)?;
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
                    replica.provide(&needs)?;
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
        // Where there is no index to find in there is nothing that could be left out.
        let finds = self.timed.iter().any(|set| set.replicas[1].is_some());
        // A host's invalidations are part of its table: what is without the table is without them.
        let remote = !partial && self.timed.iter().all(|set| set.replicas[3].is_none());
        let sums = |of: &Sums| {
            let [full, mut no_find, a, mut at, ati, mut i, second, idle] = *of;
            if partial {
                return [full, full, full, full, full, full, full, idle];
            }
            if !finds {
                no_find = full;
            }
            if remote {
                (at, i) = (ati, full);
            }
            [full, no_find, a, at, ati, i, second, idle]
        };
        // What never got a slot has cost nothing, and is no mapping.
        let (maps, unmaps) = self.scout.stalled_out();
        let mut found = components(
            &sums(&self.whole),
            &sums(&self.maps),
            &sums(&self.unmaps),
            self.without,
            self.map_count.saturating_sub(maps),
            self.unmap_count.saturating_sub(unmaps),
        );
        if self.whole[0] > 0.0 {
            found.repetition_spread = (self.spread.1 - self.spread.0) / self.whole[0];
        }
        found
    }
}
