//! Compares the sum of the meter's components with an independent measurement:
//! `cargo bench -p ringfence-lab --bench meter [-- --check]`.
//!
//! The meter derives its components from differences between eight replicas, each timed in blocks
//! of 1024 steps. This benchmark times the full layer and the replay's own loop directly, 128 steps
//! at a time. It prints their difference next to the sum of the components. Both are executed
//! cycles of a map and an unmap together. The sample is replayed several times. With `--check` the
//! program exits with 1 if a ratio is off by more than 10%.

use std::process::ExitCode;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_hw::RingLogic;
use ringfence_lab::compare::{CompareOptions, meter};
use ringfence_lab::components::{ModeParts, ReplayTable};
use ringfence_lab::layer::{DmaOps, LayerPlatform, TimedInvalidationQueue};
use ringfence_lab::mapping_cache::CachedParts;
use ringfence_lab::meter::{
    Clock, EmptyLoop, FlushFor, FlushForRings, Meter, ReplayAlloc, ReplayRing, TimedReplay, cycles,
};
use ringfence_lab::mode_dispatch::{IdentityKind, ModeVisitor, dispatch};
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Plan, Planner, Step};
use ringfence_lab::ring::{RingParts, RingSizes};
use ringfence_lab::shadow::CopyParts;
use ringfence_lab::{LabError, Profile};
use ringfence_memory::{Arena, Frames};
use ringfence_trace::{Chunk, Op, OpKind, Operations, SAMPLE, TraceOptions, TraceSource};
use ringfence_types::{Nanos, PhysAddr, PhysMemory, PhysRange};

const MODES: [&str; 6] = [
    "strict",
    "strict+",
    "fence",
    "defer+",
    "riommu",
    "riommu-ooo",
];
/// Steps between two readings of the clock.
const PHASE: usize = 128;
const REPETITIONS: usize = 5;
/// Number of replays of the sample.
const TURNS: u64 = 24;
const TOLERANCE: f64 = 0.10;
const ARENA: u64 = 256 << 20;

/// Splits a plan into plans of [`PHASE`] steps.
fn phases(plan: &Plan) -> Vec<Plan> {
    plan.steps
        .chunks(PHASE)
        .map(|steps| {
            let mut phase = Plan {
                steps: steps.to_vec(),
                ..Plan::default()
            };
            for timed in &mut phase.steps {
                if let Step::Map { first, count, .. } = &mut timed.step {
                    let own = phase.segments.len() as u32;
                    phase
                        .segments
                        .extend_from_slice(plan.segments(*first, *count));
                    *first = own;
                }
            }
            phase
        })
        .collect()
}

/// Returns the cycles that `work` takes.
fn timed(work: impl FnOnce()) -> u64 {
    let since = cycles();
    work();
    cycles().saturating_sub(since)
}

/// A replay that is timed by phases.
trait Phased {
    /// Returns the cycles of each phase.
    fn run(&mut self, phases: &[Plan]) -> Result<Vec<u64>, LabError>;
}

struct Full<D: DmaOps>(TimedReplay<D>);

impl<D: DmaOps> Phased for Full<D> {
    fn run(&mut self, phases: &[Plan]) -> Result<Vec<u64>, LabError> {
        for phase in phases {
            self.0.prepare(phase)?;
        }
        let mut clock = Clock::blocks();
        let run = |phase| timed(|| self.0.run(phase, &mut clock, None));
        Ok(phases.iter().map(run).collect())
    }
}

impl Phased for EmptyLoop {
    fn run(&mut self, phases: &[Plan]) -> Result<Vec<u64>, LabError> {
        let mut clock = Clock::blocks();
        let run = |phase| timed(|| EmptyLoop::run(self, phase, &mut clock));
        Ok(phases.iter().map(run).collect())
    }
}

fn platform() -> Result<LayerPlatform<TimedInvalidationQueue>, LabError> {
    let arena = Rc::new(Arena::new(ARENA)?);
    // Touch the pages in advance, so that page faults of this process do not count.
    for page in 0..64 {
        if let Ok(word) = arena.word(PhysAddr::new(page << 12)) {
            word.store(0, Ordering::Relaxed);
        }
    }
    let region = PhysRange::new(PhysAddr::new(0x2000), ARENA - 0x2000)
        .ok_or(LabError::Internal("region"))?;
    let queue =
        TimedInvalidationQueue::new(Rc::clone(&arena), PhysAddr::new(0), PhysAddr::new(0x1000));
    Ok(LayerPlatform {
        frames: Rc::new(Frames::new(Rc::clone(&arena), region)),
        arena,
        invalidator: queue,
        now: Nanos(0),
    })
}

struct MakeFull;

impl ModeVisitor for MakeFull {
    type Output = Result<Box<dyn Phased>, LabError>;

    fn identity(self, _: IdentityKind) -> Self::Output {
        Err(LabError::Internal("a mode without components"))
    }

    fn paged<A, T, F>(self, recipe: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let make = recipe.make_space(Profile::r210_2015().coherency(), None);
        let replica = TimedReplay::new((recipe.flush)(), platform()?, make);
        Ok(Box::new(Full(replica)))
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Self::Output {
        Err(LabError::Internal("a mode that is not measured here"))
    }

    fn shadow<P: CopyParts>(self, _: P) -> Self::Output {
        Err(LabError::Internal("a mode that is not measured here"))
    }

    fn rings<D, L, F>(self, recipe: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let flush: F = (recipe.flush)();
        let make = recipe.make_space(RingSizes::default());
        let replica = TimedReplay::new(flush, platform()?, make);
        Ok(Box::new(Full(replica)))
    }
}

/// Reads the operations of the sample. Unmaps the mappings that are live at its end, so that the
/// sample can repeat.
fn sample() -> Result<Chunk, LabError> {
    let source = TraceSource::from_reader("sample", SAMPLE)?;
    let mut operations = Operations::new("sample", source, TraceOptions::default());
    let (mut whole, mut part) = (Chunk::default(), Chunk::default());
    let mut more = true;
    while more {
        more = operations.next_chunk(&mut part)?;
        let base = whole.segments.len() as u32;
        whole.segments.extend_from_slice(&part.segments);
        whole.ops.extend(part.ops.iter().map(|op| {
            let mut op = *op;
            if let OpKind::Map { segments, .. } = &mut op.kind {
                segments.first += base;
            }
            op
        }));
    }
    let mut owners = std::collections::BTreeMap::new();
    for op in &whole.ops {
        match op.kind {
            OpKind::Map { id, .. } => owners.insert(id, *op),
            OpKind::Unmap { id } => owners.remove(&id),
        };
    }
    let time = whole.ops.last().map_or(Nanos(0), |op| op.time);
    whole.ops.extend(owners.into_iter().map(|(id, op)| Op {
        time,
        kind: OpKind::Unmap { id },
        ..op
    }));
    Ok(whole)
}

/// Plans of consecutive replays of the sample.
fn plans() -> Result<Vec<Plan>, LabError> {
    let mut chunk = sample()?;
    let (Some(first), Some(last)) = (chunk.ops.first(), chunk.ops.last()) else {
        return Err(LabError::Internal("an empty sample"));
    };
    let turn = last.time.0 - first.time.0 + 1_000;
    let mut planner = Planner::new();
    (0..TURNS)
        .map(|_| {
            let mut plan = Plan::default();
            planner.plan(&chunk, &mut plan)?;
            for op in &mut chunk.ops {
                op.time.0 += turn;
            }
            Ok(plan)
        })
        .collect()
}

/// Sums, over all phases, each phase's median over the repetitions.
fn sum_of_medians(repetitions: &[Vec<u64>]) -> f64 {
    let phases = repetitions.iter().map(Vec::len).min().unwrap_or(0);
    (0..phases)
        .map(|phase| {
            let mut times: Vec<u64> = repetitions.iter().map(|times| times[phase]).collect();
            times.sort_unstable();
            times[times.len() / 2] as f64
        })
        .sum()
}

/// Returns the cycles per pair: the sum of the meter's components, and the measurement by phases.
fn measure(mode: &Mode, plans: &[Plan]) -> Result<(f64, f64), LabError> {
    let mut options = CompareOptions::new();
    options.repetitions = REPETITIONS;
    let mut meter: Box<dyn Meter> = meter(mode, &options)?;
    let mut full = Vec::new();
    let mut idle: Vec<Box<dyn Phased>> = Vec::new();
    for _ in 0..REPETITIONS {
        full.push(dispatch(mode, MakeFull)??);
        idle.push(Box::new(EmptyLoop::default()));
    }
    let (mut maps, mut unmaps, mut phased) = (0_u64, 0_u64, 0.0);
    for plan in plans {
        meter.chunk(plan)?;
        maps += plan.maps;
        unmaps += plan.unmaps;
        let parts = phases(plan);
        for (replays, sign) in [(&mut full, 1.0), (&mut idle, -1.0)] {
            let times: Result<Vec<_>, _> = replays.iter_mut().map(|r| r.run(&parts)).collect();
            phased += sign * sum_of_medians(&times?);
        }
    }
    let found = meter.finish().cycles;
    let pairs = maps.max(1) as f64;
    let components = found.map() + found.unmap() * unmaps as f64 / pairs;
    Ok((components, phased / pairs))
}

fn main() -> Result<ExitCode, LabError> {
    let check = std::env::args().any(|argument| argument == "--check");
    let plans = plans()?;
    let pairs: u64 = plans.iter().map(|plan| plan.maps).sum();
    println!(
        "{pairs} pairs, {REPETITIONS} repetitions, phases of {PHASE} steps; executed cycles a pair"
    );
    println!(
        "{:10} {:>12} {:>10} {:>7}",
        "mode", "components", "phases", "ratio"
    );
    let mut sound = true;
    for name in MODES {
        let mode = Mode::find(name).ok_or_else(|| LabError::NoSuchMode(name.into()))?;
        let (components, phases) = measure(&mode, &plans)?;
        let ratio = components / phases;
        sound &= (ratio - 1.0).abs() <= TOLERANCE;
        println!("{name:10} {components:12.1} {phases:10.1} {ratio:7.3}");
    }
    Ok(if check && !sound {
        eprintln!(
            "components and phases differ by more than {:.0}%",
            TOLERANCE * 100.0
        );
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
