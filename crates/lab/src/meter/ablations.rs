//! The timed replays of one mode, and the computation of their components.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::MapError;
use ringfence_dma::flush::Never;
use ringfence_dma::space::Identity;
use ringfence_pgtable::Coherency;

use super::components::{CONFIGS, SecondAblation, Sums, components};
use super::{AllocTrace, Clock, Components, EmptyLoop, FreeInvalidator, TimedReplay, cycles};
use crate::error::LabError;
use crate::layer::{AttachInfo, ContextTarget, DmaLayer, LayerPlatform, PassThrough};
use crate::mode_dispatch::IdentityKind;
use crate::plan::Plan;
use crate::replay::{DynTimedReplay, PlanResources};

/// The meter of one mode.
pub trait Meter {
    /// Replays one chunk in every timed replay.
    fn chunk(&mut self, plan: &Plan) -> Result<(), LabError>;
    /// Returns the cycles by component of the chunks so far.
    fn finish(&self) -> Components;
    /// Returns the largest number of refused maps of one replay, and the error of the first map
    /// that it refused. The recorder counts as a replay. `None` if the layer refused no map.
    fn refusals(&self) -> Option<(u64, MapError)>;
    /// Returns the type name of the recorder's layer. It names the mode's allocator, table and
    /// flush policy.
    fn layer_type(&self) -> &'static str;
    /// Returns the coherency of the page tables that the replays have created, each value once.
    /// Empty before the first chunk, and in modes whose tables do not expose it.
    fn coherencies(&self) -> Vec<Coherency>;
    /// Returns true if unmaps return before another core has executed them, in every timed replay
    /// of the mode's layer.
    fn unmaps_later(&self) -> bool {
        false
    }
    /// Replays one chunk in the timed replay with index `config` in [`CONFIG_NAMES`], inside
    /// `measured`. For counting instructions from outside. Returns false if the mode lacks this
    /// replay.
    fn replay_one(
        &mut self,
        config: usize,
        plan: &Plan,
        measured: &mut dyn FnMut(&mut dyn FnMut()),
    ) -> Result<bool, LabError>;
}

/// Number of timed replays with tables, for each repetition: four configurations, timed by block
/// and by run.
pub(crate) const TIMED_REPLAYS: u64 = 8;

/// Names of the timed replays, in the order of their sums.
pub const CONFIG_NAMES: [&str; CONFIGS] = ["full", "no_find", "a", "at", "ati", "i", "it", "idle"];

/// One timed replay of each configuration, in the order of [`CONFIG_NAMES`]. Identity modes have
/// fewer.
pub(crate) struct AblationSet {
    pub(crate) replicas: [Option<Box<dyn DynTimedReplay>>; CONFIGS],
}

/// All timed replays of a mode.
pub struct Ablations {
    trace: Rc<AllocTrace>,
    /// Records the allocator results that the ablations replay.
    recorder: Box<dyn DynTimedReplay>,
    split_timed: Vec<AblationSet>,
    timed: Vec<AblationSet>,
    whole: Sums,
    maps: Sums,
    unmaps: Sums,
    /// Cycles of `full` in each repetition, over all chunks.
    repetitions: Vec<u64>,
    map_count: u64,
    unmap_count: u64,
    chunks: usize,
    overhead: u64,
    pub(super) second: SecondAblation,
    /// Coherency of the page tables that the replays have created, each value once.
    pub(super) coherencies: Rc<RefCell<Vec<Coherency>>>,
}

impl Ablations {
    pub(crate) fn new(
        repetitions: usize,
        trace: Rc<AllocTrace>,
        recorder: Box<dyn DynTimedReplay>,
        set: &mut dyn FnMut() -> Result<AblationSet, LabError>,
    ) -> Result<Self, LabError> {
        let mut sets = || -> Result<Vec<AblationSet>, LabError> {
            (0..repetitions.max(1)).map(|_| set()).collect()
        };
        let timed = sets()?;
        let split_timed = sets()?;
        Ok(Self {
            trace,
            recorder,
            split_timed,
            timed,
            whole: [0.0; CONFIGS],
            maps: [0.0; CONFIGS],
            unmaps: [0.0; CONFIGS],
            repetitions: vec![0; repetitions.max(1)],
            map_count: 0,
            unmap_count: 0,
            chunks: 0,
            overhead: clock_overhead(),
            second: SecondAblation::Table,
            coherencies: Rc::default(),
        })
    }

    /// Creates the meter of a mode without an allocator. It has no components to ablate.
    ///
    /// # Errors
    /// Memory is short.
    pub fn identity(kind: IdentityKind, repetitions: usize) -> Result<Self, LabError> {
        let whole = || -> Result<Box<dyn DynTimedReplay>, LabError> {
            let make = |of: &AttachInfo, _: &LayerPlatform<FreeInvalidator>| {
                Ok((Identity::new(of.domain), ContextTarget::PassThrough))
            };
            let platform = LayerPlatform::timed()?;
            let layer = DmaLayer::new(Never, platform, make);
            Ok(if kind.has_generic_path() {
                Box::new(TimedReplay::of(Box::new(PassThrough::new(layer))))
            } else {
                Box::new(TimedReplay::of(Box::new(layer)))
            })
        };
        Self::undivided(repetitions, &whole)
    }

    /// Creates the meter of a mode whose components are not ablated.
    pub(super) fn undivided(
        repetitions: usize,
        whole: &dyn Fn() -> Result<Box<dyn DynTimedReplay>, LabError>,
    ) -> Result<Self, LabError> {
        let trace = Rc::new(AllocTrace::default());
        Self::new(repetitions, trace, whole()?, &mut || {
            let mut replicas: [Option<Box<dyn DynTimedReplay>>; CONFIGS] = Default::default();
            replicas[0] = Some(whole()?);
            replicas[CONFIGS - 1] = Some(Box::new(EmptyLoop::default()));
            Ok(AblationSet { replicas })
        })
    }
}

/// Returns the order in which sweep number `sweep` replays the configurations.
///
/// A configuration finds the cache contents of the one before it. In eight consecutive sweeps each
/// has every other one before it exactly once (Williams 1949, a Latin square that is balanced for
/// the effect of the previous treatment).
fn order(sweep: usize) -> [usize; CONFIGS] {
    const FIRST: [usize; CONFIGS] = [0, 1, 7, 2, 6, 3, 5, 4];
    FIRST.map(|config| (config + sweep) % CONFIGS)
}

/// Returns the smallest measured cost of two consecutive clock reads.
fn clock_overhead() -> u64 {
    (0..64)
        .map(|_| {
            let before = cycles();
            cycles().saturating_sub(before)
        })
        .min()
        .unwrap_or(0)
}

/// Returns the sum over blocks of the median over repetitions.
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

impl Meter for Ablations {
    fn replay_one(
        &mut self,
        config: usize,
        plan: &Plan,
        measured: &mut dyn FnMut(&mut dyn FnMut()),
    ) -> Result<bool, LabError> {
        self.trace.clear();
        let needs = PlanResources::of(plan);
        self.recorder.prepare_for(&needs)?;
        self.recorder
            .run_plan(plan, &mut Clock::blocks(), Some(&self.trace));
        self.trace.rewind();
        let replica = self
            .timed
            .first_mut()
            .and_then(|set| set.replicas.get_mut(config)?.as_mut());
        let Some(replica) = replica else {
            return Ok(false);
        };
        replica.prepare_for(&needs)?;
        let mut clock = Clock::blocks();
        measured(&mut || replica.run_plan(plan, &mut clock, None));
        Ok(true)
    }

    fn chunk(&mut self, plan: &Plan) -> Result<(), LabError> {
        if plan.steps.is_empty() {
            return Ok(());
        }
        self.map_count += plan.maps;
        self.unmap_count += plan.unmaps;
        self.trace.clear();
        let needs = PlanResources::of(plan);
        self.recorder.prepare_for(&needs)?;
        self.recorder
            .run_plan(plan, &mut Clock::blocks(), Some(&self.trace));
        // The first sweep of each chunk is another one.
        let first = self.chunks;
        let mut times = [const { Vec::new() }; CONFIGS];
        for (repetition, set) in self.timed.iter_mut().enumerate() {
            for config in order(first + repetition) {
                if let Some(replica) = &mut set.replicas[config] {
                    replica.prepare_for(&needs)?;
                    self.trace.rewind();
                    let mut clock = Clock::blocks();
                    replica.run_plan(plan, &mut clock, None);
                    times[config].push(clock.blocks);
                }
            }
        }
        let mut maps = [const { Vec::new() }; CONFIGS];
        let mut unmaps = [const { Vec::new() }; CONFIGS];
        for (repetition, set) in self.split_timed.iter_mut().enumerate() {
            for config in order(first + repetition) {
                if let Some(replica) = &mut set.replicas[config] {
                    replica.prepare_for(&needs)?;
                    self.trace.rewind();
                    let mut clock = Clock::runs(self.overhead);
                    replica.run_plan(plan, &mut clock, None);
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
        for (total, blocks) in self.repetitions.iter_mut().zip(&times[0]) {
            *total += blocks.iter().sum::<u64>();
        }
        self.chunks += 1;
        Ok(())
    }

    fn refusals(&self) -> Option<(u64, MapError)> {
        let sets = self.timed.iter().chain(&self.split_timed);
        let replicas = sets.flat_map(|set| set.replicas.iter().flatten());
        // Start with the recorder, which wins ties: replayed allocators refuse the same maps, but
        // with an error of their own.
        let all = std::iter::once(&self.recorder).chain(replicas);
        let refusals = all.filter_map(|replica| replica.refusals());
        refusals.reduce(|one, other| if other.0 > one.0 { other } else { one })
    }

    fn layer_type(&self) -> &'static str {
        self.recorder.layer_type()
    }

    fn coherencies(&self) -> Vec<Coherency> {
        self.coherencies.borrow().clone()
    }

    fn unmaps_later(&self) -> bool {
        let sets = self.timed.iter().chain(&self.split_timed);
        let whole = sets.filter_map(|set| set.replicas[0].as_ref());
        let mut layers = std::iter::once(&self.recorder).chain(whole);
        layers.all(|replay| replay.unmaps_later())
    }

    fn finish(&self) -> Components {
        // Identity modes have only `full` and `idle`: all cycles count as `other`.
        let partial = self.timed.iter().all(|set| set.replicas[2].is_none());
        // An allocator without an index has no lookups to ablate.
        let finds = self.timed.iter().any(|set| set.replicas[1].is_some());
        // The table of a host includes its invalidations, so replays without the table have
        // neither.
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
        // Maps that never got a slot cost nothing, so they do not count.
        let (maps, unmaps) = self.recorder.stalled_out();
        let mut found = components(
            &sums(&self.whole),
            &sums(&self.maps),
            &sums(&self.unmaps),
            self.second,
            self.map_count.saturating_sub(maps),
            self.unmap_count.saturating_sub(unmaps),
        );
        // As a share of the same whole as the spread of the orders.
        let whole = (self.whole[0] - self.whole[CONFIGS - 1]).abs();
        if whole > 0.0 {
            let fastest = self.repetitions.iter().min().copied().unwrap_or(0);
            let slowest = self.repetitions.iter().max().copied().unwrap_or(0);
            found.repetition_spread = (slowest - fastest) as f64 / whole;
        }
        found
    }
}

#[cfg(test)]
mod tests;
