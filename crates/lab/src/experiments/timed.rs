//! What a mode executes and is charged for under a workload: the layer alone, driven by plans, its
//! invalidations counted.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{Burst, BurstAsPublished, Flush, Never};
use ringfence_dma::ring::{Ring, RingAsPublished, RingSetup, RingTables, SlotChoice, lay_out};
use ringfence_dma::space::{Identity, Paged, Rings, Space};
use ringfence_hw::RingLogic;
use ringfence_memory::{Arena, Frames, WriteBack};
use ringfence_pgtable::Coherency;
use ringfence_types::{Nanos, PhysAddr, PhysMemory, PhysRange};

use super::capture::Run;
use super::finding::median;
use crate::Profile;
use crate::error::LabError;
use crate::guest::RtcParts;
use crate::meter::{
    Clock, EmptyLoop, FlushFor, FlushForRings, InvalidationQueue, ReplayAlloc, ReplayRing,
    TimedPlatform, TimedReplay,
};
use crate::mode_dispatch::{ModeParts, ModeVisitor, ReplayTable, dispatch};
use crate::modes::{Mode, TableKind};
use crate::plan::Plan;
use crate::replay::AttachInfo;
use crate::ring::RingParts;

/// Memory of one replica: tables only, no buffers.
const ARENA: u64 = 256 << 20;
/// Frames touched beforehand, so that no page fault of this process is taken for work of the layer.
const WARM_FRAMES: u64 = 256;

/// A platform on which write-backs are executed, by that instruction.
fn bench(write_back: WriteBack) -> Result<TimedPlatform<InvalidationQueue>, LabError> {
    let arena = Rc::new(Arena::with_write_back(ARENA, write_back)?);
    let region = PhysRange::new(PhysAddr::new(0x2000), ARENA - 0x2000)
        .ok_or(LabError::Internal("replica region"))?;
    for page in 0..WARM_FRAMES {
        if let Ok(word) = arena.word(PhysAddr::new(page << 12)) {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let queue = InvalidationQueue::new(Rc::clone(&arena), PhysAddr::new(0), PhysAddr::new(0x1000));
    // The type of the meter's own replicas, so that theirs serve here too.
    Ok(TimedPlatform {
        frames: Frames::new(Rc::clone(&arena), region),
        arena,
        invalidator: queue,
        now: Nanos(0),
    })
}

/// A replica of any mode.
trait DynExperimentReplay {
    fn drive(&mut self, plan: &Plan, clock: &mut Clock) -> Result<u64, LabError>;
}

impl<S: Space, F: Flush<S, u64>> DynExperimentReplay for TimedReplay<S, F, InvalidationQueue> {
    fn drive(&mut self, plan: &Plan, clock: &mut Clock) -> Result<u64, LabError> {
        self.prepare(plan)?;
        let before = self.platform.invalidator.requests();
        self.run(plan, clock, None);
        match self.refusals() {
            None => Ok(self.platform.invalidator.requests() - before),
            Some(_) => Err(LabError::Internal("a map that was refused")),
        }
    }
}

/// Makes a replica of a mode.
struct MakeReplica {
    coherency: Coherency,
    write_back: WriteBack,
}

impl ModeVisitor for MakeReplica {
    type Output = Result<Box<dyn DynExperimentReplay>, LabError>;

    fn identity(self, _: TableKind) -> Self::Output {
        let make =
            |of: &AttachInfo, _: &TimedPlatform<InvalidationQueue>| Ok(Identity::new(of.domain));
        let bench = bench(self.write_back)?;
        Ok(Box::new(TimedReplay::new(Never, bench, make)))
    }

    fn paged<A, T, F>(self, recipe: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let coherency = self.coherency;
        let make = move |of: &AttachInfo, bench: &TimedPlatform<InvalidationQueue>| {
            let (memory, frames) = (&bench.arena, &bench.frames);
            let table = (recipe.table)(of.domain, coherency, memory, frames, None)?;
            let alloc = recipe.allocator(memory, frames, Some(&table))?;
            Ok(Paged::new(alloc, table, recipe.rounding))
        };
        let flush = (recipe.flush)();
        Ok(Box::new(TimedReplay::new(
            flush,
            bench(self.write_back)?,
            make,
        )))
    }

    fn rtc(self, _: RtcParts) -> Self::Output {
        Err(LabError::Internal("an experiment on a cache"))
    }

    /// An experiment's rings are a port's, not a trace's: [`rings`] makes them.
    fn rings<D, L, F>(self, _: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        Err(LabError::Internal("an experiment on a trace's rings"))
    }
}

/// Slots of the table of a ring's buffers: two buffers for each of 1024 descriptors are live at
/// most, and a burst of 200 packets waits.
const SLOTS: u32 = 4096;

/// The rings of a port, each a device with one table, driven by `D`. Lines of a table that the
/// hardware does not snoop are written back when a doorbell is rung and at the end of a burst.
fn rings<D, F>(
    coherency: Coherency,
    write_back: WriteBack,
    flush: F,
) -> Result<Box<dyn DynExperimentReplay>, LabError>
where
    D: ReplayRing,
    F: Flush<Rings<D, RefCell<D>>, u64> + 'static,
{
    let make = move |of: &AttachInfo, bench: &TimedPlatform<InvalidationQueue>| {
        let bytes = u64::from(SLOTS) * 16 + 4096;
        let base = bench.frames.alloc_contiguous(bytes.div_ceil(4096) + 1);
        let base = base.map_err(|_| LabError::Internal("room for a ring"))?;
        let failed = || LabError::Internal("a ring that cannot be laid out");
        let tables = RingTables::new(base, &[SLOTS]).map_err(|_| failed())?;
        let choice = SlotChoice::Tail;
        let setup = RingSetup { choice, coherency };
        let rings = lay_out(&*bench.arena, &tables, setup).map_err(|_| failed())?;
        Ok(Rings::<D, RefCell<D>>::new(
            of.domain,
            of.device,
            rings,
            RefCell::new,
        ))
    };
    Ok(Box::new(TimedReplay::new(flush, bench(write_back)?, make)))
}

/// What is timed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TimedSubject {
    /// A mode that pages.
    Mode(Mode),
    /// Rings that the hardware snoops (`riommu`).
    Rings,
    /// Rings that it does not (`riommu-`).
    RingsNonCoherent,
    /// The same as Fig. 11 prints it (`riommu--literal`): a barrier and a write-back at each map
    /// and each unmap.
    RingsLiteralNonCoherent,
}

impl TimedSubject {
    /// A mode by its name; of the ring modes, `riommu`, `riommu-` and `riommu--literal`.
    ///
    /// # Errors
    /// There is none of that name.
    pub(super) fn from_name(name: &str) -> Result<Self, LabError> {
        Ok(match name {
            "riommu" => Self::Rings,
            "riommu-" => Self::RingsNonCoherent,
            "riommu--literal" => Self::RingsLiteralNonCoherent,
            _ => Self::Mode(Mode::find(name).ok_or_else(|| LabError::NoSuchMode(name.into()))?),
        })
    }
}

/// What a run cost.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Cost {
    /// Cycles that were executed, without the replay's own loop: each block of steps by its median
    /// over the repetitions, so that what else happens on the processor hardly counts.
    pub(super) measured: f64,
    /// The same of each repetition by itself, in the order in which they ran.
    pub(super) repetitions: Vec<f64>,
    /// Largest less smallest repetition, as a share.
    pub(super) spread: f64,
    /// Invalidation commands.
    pub(super) invalidations: u64,
    /// Pairs of a map and an unmap: the larger number of either.
    pub(super) pairs: u64,
}

impl Cost {
    /// Of `repetitions` of `plan`, each by the cycles of its blocks; `own` is what the replay's own
    /// loop takes of them.
    pub(super) fn of(repetitions: &[Vec<u64>], plan: &Plan, own: f64, invalidations: u64) -> Self {
        let each: Vec<f64> = repetitions
            .iter()
            .map(|blocks| (blocks.iter().sum::<u64>() as f64 - own).max(0.0))
            .collect();
        Self {
            measured: (sum_of_medians(repetitions) - own).max(0.0),
            spread: median(&each).1,
            repetitions: each,
            invalidations,
            pairs: plan.maps.max(plan.unmaps),
        }
    }

    /// Executed cycles of a map and an unmap.
    pub(super) fn measured_per_pair(&self) -> f64 {
        self.measured / self.pairs.max(1) as f64
    }

    /// Cycles of a map and an unmap that `profile` charges.
    pub(super) fn modelled_per_pair(&self, profile: &Profile) -> f64 {
        self.invalidations_per_pair() * profile.invalidation_cycles as f64
    }

    /// Invalidation commands for a map and an unmap.
    pub(super) fn invalidations_per_pair(&self) -> f64 {
        self.invalidations as f64 / self.pairs.max(1) as f64
    }

    /// Both.
    pub(super) fn per_pair(&self, profile: &Profile) -> f64 {
        self.measured_per_pair() + self.modelled_per_pair(profile)
    }

    /// Both, in each repetition by itself.
    pub(super) fn each_per_pair(&self, profile: &Profile) -> Vec<f64> {
        let (pairs, charged) = (self.pairs.max(1) as f64, self.modelled_per_pair(profile));
        let each = self.repetitions.iter();
        each.map(|executed| executed / pairs + charged).collect()
    }
}

/// Replicas of one subject, which go through the same runs.
pub(super) struct TimedReplays {
    subject: TimedSubject,
    replicas: Vec<Box<dyn DynExperimentReplay>>,
}

impl TimedReplays {
    /// Fresh replicas of `subject`, as many as there are repetitions.
    ///
    /// # Errors
    /// No memory, or the mode is not built in.
    pub(super) fn new(
        subject: TimedSubject,
        profile: &Profile,
        repetitions: usize,
    ) -> Result<Self, LabError> {
        Self::with_write_back(subject, profile, repetitions, WriteBack::best())
    }

    /// The same, whose lines are written back by a given instruction.
    ///
    /// # Errors
    /// As for [`new`](Self::new), or this processor has no such instruction.
    pub(super) fn with_write_back(
        subject: TimedSubject,
        profile: &Profile,
        repetitions: usize,
        write_back: WriteBack,
    ) -> Result<Self, LabError> {
        // More invalidations than a burst of any experiment has unmaps.
        const LONGEST: usize = 4096;
        let make = || match &subject {
            TimedSubject::Mode(mode) => {
                let coherency = profile.coherency();
                let make = MakeReplica {
                    coherency,
                    write_back,
                };
                dispatch(mode, make)?
            }
            TimedSubject::Rings => {
                let burst = Burst::new(LONGEST);
                rings::<Ring, _>(Coherency::Coherent, write_back, burst)
            }
            TimedSubject::RingsNonCoherent => {
                let burst = Burst::new(LONGEST);
                rings::<Ring, _>(Coherency::NonCoherent, write_back, burst)
            }
            TimedSubject::RingsLiteralNonCoherent => {
                rings::<RingAsPublished, _>(Coherency::NonCoherent, write_back, BurstAsPublished)
            }
        };
        let replicas = (0..repetitions.max(1)).map(|_| make());
        Ok(Self {
            replicas: replicas.collect::<Result<_, _>>()?,
            subject,
        })
    }

    /// Goes through a run, one repetition after the other.
    ///
    /// # Errors
    /// A map was refused.
    pub(super) fn run(&mut self, run: &Run) -> Result<Cost, LabError> {
        let costs = run_in_turns(std::slice::from_mut(self), run)?;
        costs.into_iter().next().ok_or(LabError::Internal("a cost"))
    }
}

/// Goes through a run with each of `subjects`, repetition by repetition, another one first each
/// time: what else happens on the processor happens to all of them.
///
/// # Errors
/// A map was refused.
pub(super) fn run_in_turns(
    subjects: &mut [TimedReplays],
    run: &Run,
) -> Result<Vec<Cost>, LabError> {
    let by_ring = run.by_ring();
    let loops = [&run.plan, &by_ring].map(loop_overhead);
    let plan = |subject: &TimedSubject| match subject {
        TimedSubject::Mode(_) => (&run.plan, loops[0]),
        _ => (&by_ring, loops[1]),
    };
    let mut blocks: Vec<Vec<Vec<u64>>> = vec![Vec::new(); subjects.len()];
    let mut invalidations = vec![0; subjects.len()];
    let count = subjects.len();
    let longest = subjects.iter().map(|subject| subject.replicas.len()).max();
    for repetition in 0..longest.unwrap_or(0) {
        for turn in 0..count {
            let place = (turn + repetition) % count;
            let TimedReplays { subject, replicas } = &mut subjects[place];
            if let Some(replica) = replicas.get_mut(repetition) {
                let mut clock = Clock::blocks();
                invalidations[place] = replica.drive(plan(subject).0, &mut clock)?;
                blocks[place].push(clock.blocks);
            }
        }
    }
    let all = subjects.iter().zip(&blocks).zip(invalidations);
    let cost = |((subject, blocks), invalidations): ((&TimedReplays, &Vec<Vec<u64>>), u64)| {
        let (plan, own) = plan(&subject.subject);
        Cost::of(blocks, plan, own, invalidations)
    };
    Ok(all.map(cost).collect())
}

/// The median over the repetitions of each block, summed over blocks.
pub(super) fn sum_of_medians(repetitions: &[Vec<u64>]) -> f64 {
    let count = repetitions.iter().map(Vec::len).min().unwrap_or(0);
    let block = |block: usize| {
        let times = repetitions.iter().map(|blocks| blocks[block] as f64);
        median(&times.collect::<Vec<_>>()).0
    };
    (0..count).map(block).sum()
}

/// Cycles of the replay's own loop: of each block the least of a few tries, since nothing but
/// disturbance makes it longer.
fn loop_overhead(plan: &Plan) -> f64 {
    const TRIES: usize = 3;
    let tries: Vec<Vec<u64>> = (0..TRIES)
        .map(|_| {
            let mut clock = Clock::blocks();
            EmptyLoop::default().run(plan, &mut clock);
            clock.blocks
        })
        .collect();
    let blocks = tries.iter().map(Vec::len).min().unwrap_or(0);
    let least = (0..blocks).filter_map(|block| tries.iter().map(|blocks| blocks[block]).min());
    least.sum::<u64>() as f64
}

#[cfg(test)]
mod tests {
    use ringfence_devices::nic::Profile as Adapter;
    use ringfence_devices::workload::NetperfStream;

    use super::*;
    use crate::experiments::capture::Capture;

    #[test]
    fn invalidations_are_those_of_the_policy() {
        let profile = Profile::r210_2015();
        let mut capture =
            Capture::with(Adapter::BRCM, NetperfStream::default(), 200, 2000).unwrap();
        let runs = [capture.run().unwrap(), capture.run().unwrap()];
        let unmaps: u64 = runs.iter().map(|run| run.plan.unmaps).sum();
        let bursts: u64 = runs.iter().map(Run::bursts).sum();
        for (name, wanted) in [
            ("none", 0),
            ("strict", unmaps),
            ("defer", unmaps / 250),
            ("riommu", bursts),
            ("riommu-", bursts),
            ("riommu--literal", bursts),
        ] {
            let mut timed =
                TimedReplays::new(TimedSubject::from_name(name).unwrap(), &profile, 1).unwrap();
            let count: u64 = runs
                .iter()
                .map(|run| timed.run(run).unwrap().invalidations)
                .sum();
            assert_eq!(count, wanted, "{name}");
        }
        assert!(TimedSubject::from_name("nothing").is_err());
    }
}
