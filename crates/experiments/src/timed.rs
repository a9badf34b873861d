//! Timed replays of the DMA layer under a workload. Plans drive the layer without devices; the
//! replay measures cycles and counts invalidations, which the profile models.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use ringfence_dma::flush::{Burst, FlushPolicy, Never};
use ringfence_dma::ring::{Ring, RingSetup, RingTables, SlotChoice, lay_out};
use ringfence_dma::space::{Identity, Rings, Space};
use ringfence_hw::RingLogic;
use ringfence_memory::{Arena, Frames, WriteBack};
use ringfence_papers::{BurstAsPublished, RingAsPublished};
use ringfence_pgtable::Coherency;
use ringfence_types::{Nanos, PhysAddr, PhysMemory, PhysRange};

use super::capture::Run;
use super::finding::median;
use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::components::{ModeParts, ReplayTable};
use ringfence_lab::guest::RtcParts;
use ringfence_lab::layer::{
    AttachInfo, ContextTarget, DmaLayer, DmaOps, LayerPlatform, PassThrough,
};
use ringfence_lab::meter::{
    Clock, EmptyLoop, FlushFor, FlushForRings, InvalidationQueue, ReplayAlloc, ReplayRing,
    TimedReplay,
};
use ringfence_lab::mode_dispatch::{IdentityKind, ModeVisitor, dispatch};
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Plan, Step, TimedStep};
use ringfence_lab::ring::RingParts;

/// Bytes of memory of one replica: tables only, no buffers.
const ARENA: u64 = 256 << 20;
/// Frames touched in advance, so that no page fault of this process counts as work of the layer.
const WARM_FRAMES: u64 = 256;

/// A platform that executes write-backs with the instruction `write_back`.
fn bench(write_back: WriteBack) -> Result<LayerPlatform<InvalidationQueue>, LabError> {
    let arena = Rc::new(Arena::with_write_back(ARENA, write_back)?);
    let region = PhysRange::new(PhysAddr::new(0x2000), ARENA - 0x2000)
        .ok_or(LabError::Internal("replica region"))?;
    for page in 0..WARM_FRAMES {
        if let Ok(word) = arena.word(PhysAddr::new(page << 12)) {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let queue = InvalidationQueue::new(Rc::clone(&arena), PhysAddr::new(0), PhysAddr::new(0x1000));
    // Same type as in the meter's replicas, so both share one monomorphisation.
    Ok(LayerPlatform {
        frames: Rc::new(Frames::new(Rc::clone(&arena), region)),
        arena,
        invalidator: queue,
        now: Nanos(0),
    })
}

/// A replica of any mode.
trait DynExperimentReplay {
    /// Performs the blocks of `plan`. Returns the number of invalidations in those that count, and
    /// leaves their times in `clock`.
    fn drive(&mut self, plan: &Plan, blocks: &[Block], clock: &mut Clock) -> Result<u64, LabError>;
}

/// A layer that counts its invalidations.
trait CountsInvalidations: DmaOps {
    fn invalidations(&self) -> u64;
}

impl<S: Space, F: FlushPolicy<S, u64>> CountsInvalidations for DmaLayer<S, F, InvalidationQueue> {
    fn invalidations(&self) -> u64 {
        self.platform.invalidator.requests()
    }
}

impl<L: CountsInvalidations + 'static> CountsInvalidations for PassThrough<L> {
    fn invalidations(&self) -> u64 {
        self.layer().invalidations()
    }
}

impl<L: CountsInvalidations> DynExperimentReplay for TimedReplay<L> {
    fn drive(&mut self, plan: &Plan, blocks: &[Block], clock: &mut Clock) -> Result<u64, LabError> {
        self.prepare(plan)?;
        let mut invalidations = 0;
        for block in blocks {
            let before = self.layer().invalidations();
            self.run_block(plan, block.steps(plan), clock, None);
            if block.counts {
                invalidations += self.layer().invalidations() - before;
            } else {
                clock.blocks.pop();
            }
        }
        match self.refusals() {
            None => Ok(invalidations),
            Some(_) => Err(LabError::Internal("a map that was refused")),
        }
    }
}

/// Visitor that makes a replica of a mode.
struct MakeReplica {
    coherency: Coherency,
    write_back: WriteBack,
}

impl ModeVisitor for MakeReplica {
    type Output = Result<Box<dyn DynExperimentReplay>, LabError>;

    fn identity(self, kind: IdentityKind) -> Self::Output {
        let make = |of: &AttachInfo, _: &LayerPlatform<InvalidationQueue>| {
            Ok((Identity::new(of.domain), ContextTarget::PassThrough))
        };
        let layer = DmaLayer::new(Never, bench(self.write_back)?, make);
        Ok(if kind.has_generic_path() {
            Box::new(TimedReplay::of(Box::new(PassThrough::new(layer))))
        } else {
            Box::new(TimedReplay::of(Box::new(layer)))
        })
    }

    fn paged<A, T, F>(self, recipe: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let make = recipe.make_space(self.coherency, None);
        let bench = bench(self.write_back)?;
        Ok(Box::new(TimedReplay::new((recipe.flush)(), bench, make)))
    }

    fn rtc(self, _: RtcParts) -> Self::Output {
        Err(LabError::Internal("an experiment on a cache"))
    }

    /// Rejects rings of a trace: experiments use the rings of a port, which [`rings`] makes.
    fn rings<D, L, F>(self, _: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        Err(LabError::Internal("an experiment on a trace's rings"))
    }
}

/// Slots of a ring's table. At most two buffers for each of 1024 descriptors are live, and the
/// unmaps of a burst of 200 packets also occupy slots until it ends.
const SLOTS: u32 = 4096;

/// A replica whose driver `D` treats each ring of a port as a device with one table. With
/// non-coherent tables, it writes lines back at each doorbell and at the end of each burst.
fn rings<D, F>(
    coherency: Coherency,
    write_back: WriteBack,
    flush: F,
) -> Result<Box<dyn DynExperimentReplay>, LabError>
where
    D: ReplayRing,
    F: FlushPolicy<Rings<D, RefCell<D>>, u64> + 'static,
{
    let make = move |of: &AttachInfo, bench: &LayerPlatform<InvalidationQueue>| {
        let bytes = u64::from(SLOTS) * 16 + 4096;
        let base = bench.frames.alloc_contiguous(bytes.div_ceil(4096) + 1);
        let base = base.map_err(|_| LabError::Internal("room for a ring"))?;
        let failed = || LabError::Internal("a ring that cannot be laid out");
        let tables = RingTables::new(base, &[SLOTS]).map_err(|_| failed())?;
        let choice = SlotChoice::Tail;
        let setup = RingSetup { choice, coherency };
        let rings = lay_out(&*bench.arena, &tables, setup).map_err(|_| failed())?;
        let space = Rings::<D, RefCell<D>>::new(of.domain, of.device, rings, RefCell::new);
        Ok((space, ContextTarget::Table(base)))
    };
    Ok(Box::new(TimedReplay::new(flush, bench(write_back)?, make)))
}

/// Subject of a timed replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TimedSubject {
    /// A mode without rings: paged or identity.
    Mode(Mode),
    /// Rings with tables that the hardware snoops (`riommu`).
    Rings,
    /// Rings with tables that the hardware does not snoop (`riommu-`).
    RingsNonCoherent,
    /// Non-coherent rings as published in rIOMMU Fig. 11 (`riommu--paper`): a barrier and a
    /// write-back at each map and each unmap.
    RingsAsPublishedNonCoherent,
}

impl TimedSubject {
    /// Returns the subject for a mode's name. Of the ring modes, only `riommu`, `riommu-` and
    /// `riommu--paper` can be timed.
    ///
    /// # Errors
    /// No mode has this name.
    pub(super) fn from_name(name: &str) -> Result<Self, LabError> {
        Ok(match name {
            "riommu" => Self::Rings,
            "riommu-" => Self::RingsNonCoherent,
            "riommu--paper" => Self::RingsAsPublishedNonCoherent,
            _ => Self::Mode(Mode::find(name).ok_or_else(|| LabError::NoSuchMode(name.into()))?),
        })
    }
}

/// The steps of a run whose cost counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CountedSteps {
    /// Every step of the run costs something.
    All,
    /// Those between an interrupt of a reception and the doorbell of the reply. The unmaps of
    /// completed transmissions, and the ends of their bursts, happen while the reply travels.
    UntilReply,
}

/// Consecutive steps of a run that are timed together.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    range: Range<usize>,
    counts: bool,
}

impl Block {
    fn steps<'a>(&self, plan: &'a Plan) -> &'a [TimedStep] {
        plan.steps.get(self.range.clone()).unwrap_or_default()
    }
}

impl CountedSteps {
    /// Maximum number of steps of a block.
    const LONGEST: usize = 1024;

    fn counts(self, step: &Step, lane: u16) -> bool {
        let completes = matches!(step, Step::Unmap { .. } | Step::EndBurst { .. });
        let transmission = !lane.is_multiple_of(2);
        self == Self::All || !(completes && transmission)
    }

    /// Cuts a run into blocks, in which either all steps count or none.
    fn blocks(self, run: &Run) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        for (at, (timed, lane)) in run.plan.steps.iter().zip(&run.lanes).enumerate() {
            let counts = self.counts(&timed.step, *lane);
            match blocks.last_mut() {
                Some(last) if last.counts == counts && last.range.len() < Self::LONGEST => {
                    last.range.end = at + 1;
                }
                _ => blocks.push(Block {
                    range: at..at + 1,
                    counts,
                }),
            }
        }
        blocks
    }
}

/// Cost of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Cost {
    /// Measured cycles without the replay's own loop: the sum over blocks of steps of each block's
    /// median over the repetitions. The medians suppress disturbances on the CPU.
    pub(super) measured: f64,
    /// Measured cycles of each repetition, in the order in which they ran.
    pub(super) repetitions: Vec<f64>,
    /// Largest minus smallest repetition, in cycles.
    pub(super) spread: f64,
    /// Number of invalidation commands.
    pub(super) invalidations: u64,
    /// Number of map/unmap pairs: the larger of the numbers of maps and unmaps.
    pub(super) pairs: u64,
}

impl Cost {
    /// Cost of `plan` from `repetitions`, each a list of cycles per block. `own` is the part that
    /// the replay's own loop takes.
    pub(super) fn of(repetitions: &[Vec<u64>], plan: &Plan, own: f64, invalidations: u64) -> Self {
        let each: Vec<f64> = repetitions
            .iter()
            .map(|blocks| (blocks.iter().sum::<u64>() as f64 - own).max(0.0))
            .collect();
        Self {
            measured: (sum_of_medians(repetitions) - own).max(0.0),
            spread: median(&each).spread,
            repetitions: each,
            invalidations,
            pairs: plan.maps.max(plan.unmaps),
        }
    }

    /// Measured cycles per map/unmap pair.
    pub(super) fn measured_per_pair(&self) -> f64 {
        self.measured / self.pairs.max(1) as f64
    }

    /// Spread of the measured cycles per map/unmap pair.
    pub(super) fn spread_per_pair(&self) -> f64 {
        self.spread / self.pairs.max(1) as f64
    }

    /// Cycles that `profile` models per map/unmap pair.
    pub(super) fn modelled_per_pair(&self, profile: &Profile) -> f64 {
        self.invalidations_per_pair() * profile.invalidation_cycles as f64
    }

    /// Invalidation commands per map/unmap pair.
    pub(super) fn invalidations_per_pair(&self) -> f64 {
        self.invalidations as f64 / self.pairs.max(1) as f64
    }

    /// Measured and modelled cycles per map/unmap pair.
    pub(super) fn per_pair(&self, profile: &Profile) -> f64 {
        self.measured_per_pair() + self.modelled_per_pair(profile)
    }

    /// Measured and modelled cycles per map/unmap pair, for each repetition.
    pub(super) fn each_per_pair(&self, profile: &Profile) -> Vec<f64> {
        let (pairs, modelled) = (self.pairs.max(1) as f64, self.modelled_per_pair(profile));
        let each = self.repetitions.iter();
        each.map(|measured_part| measured_part / pairs + modelled)
            .collect()
    }
}

/// Replicas of one subject, all of which perform the same runs.
pub(super) struct TimedReplays {
    subject: TimedSubject,
    replicas: Vec<Box<dyn DynExperimentReplay>>,
}

impl TimedReplays {
    /// Makes a new replica of `subject` for each repetition.
    ///
    /// # Errors
    /// Memory is exhausted, or the mode is not in this build.
    pub(super) fn new(
        subject: TimedSubject,
        profile: &Profile,
        repetitions: usize,
    ) -> Result<Self, LabError> {
        Self::with_write_back(subject, profile, repetitions, WriteBack::best())
    }

    /// Like [`new`](Self::new), but writes lines back with a given instruction.
    ///
    /// # Errors
    /// As for [`new`](Self::new), or this CPU does not have the instruction.
    pub(super) fn with_write_back(
        subject: TimedSubject,
        profile: &Profile,
        repetitions: usize,
        write_back: WriteBack,
    ) -> Result<Self, LabError> {
        // Burst limit: more unmaps than a burst of any experiment has.
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
            TimedSubject::RingsAsPublishedNonCoherent => {
                rings::<RingAsPublished, _>(Coherency::NonCoherent, write_back, BurstAsPublished)
            }
        };
        let replicas = (0..repetitions.max(1)).map(|_| make());
        Ok(Self {
            replicas: replicas.collect::<Result<_, _>>()?,
            subject,
        })
    }

    /// Performs a run once on each replica.
    ///
    /// # Errors
    /// The layer refused a map.
    pub(super) fn run(&mut self, run: &Run) -> Result<Cost, LabError> {
        let costs = run_in_turns(std::slice::from_mut(self), run, CountedSteps::All)?;
        costs.into_iter().next().ok_or(LabError::Internal("a cost"))
    }
}

/// Performs a run with each of `subjects`, repetition by repetition. Each repetition starts with
/// another subject, so that disturbances on the CPU affect all of them. The costs are those of the
/// steps in `counted`.
///
/// # Errors
/// The layer refused a map.
pub(super) fn run_in_turns(
    subjects: &mut [TimedReplays],
    run: &Run,
    counted: CountedSteps,
) -> Result<Vec<Cost>, LabError> {
    let by_ring = run.by_ring();
    let parts = counted.blocks(run);
    let loops = [&run.plan, &by_ring].map(|plan| loop_overhead(plan, &parts));
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
                invalidations[place] = replica.drive(plan(subject).0, &parts, &mut clock)?;
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

/// Sums, over all blocks, each block's median over the repetitions.
pub(super) fn sum_of_medians(repetitions: &[Vec<u64>]) -> f64 {
    let count = repetitions.iter().map(Vec::len).min().unwrap_or(0);
    let block = |block: usize| {
        let times = repetitions.iter().map(|blocks| blocks[block] as f64);
        median(&times.collect::<Vec<_>>()).middle
    };
    (0..count).map(block).sum()
}

/// Cycles of the replay's own loop in the blocks that count: the sum of each block's minimum over a
/// few tries, since disturbances only ever lengthen a block.
fn loop_overhead(plan: &Plan, parts: &[Block]) -> f64 {
    const TRIES: usize = 3;
    let tries: Vec<Vec<u64>> = (0..TRIES)
        .map(|_| {
            let mut clock = Clock::blocks();
            let mut empty = EmptyLoop::default();
            for part in parts.iter().filter(|part| part.counts) {
                empty.run_block(plan, part.steps(plan), &mut clock);
            }
            clock.blocks
        })
        .collect();
    let blocks = tries.iter().map(Vec::len).min().unwrap_or(0);
    let least = (0..blocks).filter_map(|block| tries.iter().map(|blocks| blocks[block]).min());
    least.sum::<u64>() as f64
}

#[cfg(test)]
mod tests {
    use ringfence_devices::nic::NicProfile;
    use ringfence_devices::workload::{NetperfStream, RequestResponse};

    use super::*;
    use crate::capture::Capture;

    /// Request-response on brcm: one transmission completes for each reply.
    #[test]
    fn completions_of_transmissions_do_not_delay_a_reply() {
        let workload = RequestResponse::default();
        let mut capture = Capture::with(NicProfile::BRCM, workload, 1, 600).unwrap();
        let run = capture.run().unwrap();
        let all = CountedSteps::All.blocks(&run);
        let parts = CountedSteps::UntilReply.blocks(&run);
        for blocks in [&all, &parts] {
            let ends = blocks
                .windows(2)
                .all(|two| two[0].range.end == two[1].range.start);
            assert!(ends && blocks[0].range.start == 0);
            assert_eq!(blocks[blocks.len() - 1].range.end, run.plan.steps.len());
        }
        assert!(all.iter().all(|block| block.counts));
        let unmaps = |counts: bool| {
            let blocks = parts.iter().filter(|block| block.counts == counts);
            let steps = blocks.flat_map(|block| block.steps(&run.plan));
            let unmaps = steps.filter(|timed| matches!(timed.step, Step::Unmap { .. }));
            unmaps.count() as u64
        };
        let left_out = parts.iter().filter(|block| !block.counts);
        let mut rings = left_out.flat_map(|block| &run.lanes[block.range.clone()]);
        assert!(rings.all(|ring| ring % 2 == 1), "a receive ring");
        assert_eq!(unmaps(true), run.traffic.received);
        assert!(unmaps(false) > 200, "{}", unmaps(false));
        assert_eq!(unmaps(true) + unmaps(false), run.plan.unmaps);
        // Strict invalidates at each unmap, and a ring at the end of each burst.
        let profile = Profile::r210_2015();
        for name in ["strict", "riommu"] {
            let subject = TimedSubject::from_name(name).unwrap();
            let mut timed = [TimedReplays::new(subject, &profile, 1).unwrap()];
            let counted = CountedSteps::UntilReply;
            let cost = run_in_turns(&mut timed, &run, counted).unwrap();
            assert_eq!(cost[0].invalidations, run.traffic.received, "{name}");
        }
        let subject = TimedSubject::from_name("none").unwrap();
        let mut timed = TimedReplays::new(subject, &profile, 1).unwrap();
        let mut clock = Clock::blocks();
        let drive = timed.replicas[0].drive(&run.plan, &parts, &mut clock);
        assert_eq!(drive.unwrap(), 0);
        let counted = parts.iter().filter(|block| block.counts);
        assert_eq!(clock.blocks.len(), counted.count());
    }

    #[test]
    fn invalidations_are_those_of_the_policy() {
        let profile = Profile::r210_2015();
        let mut capture =
            Capture::with(NicProfile::BRCM, NetperfStream::default(), 200, 2000).unwrap();
        let runs = [capture.run().unwrap(), capture.run().unwrap()];
        let unmaps: u64 = runs.iter().map(|run| run.plan.unmaps).sum();
        let bursts: u64 = runs.iter().map(Run::bursts).sum();
        for (name, wanted) in [
            ("none", 0),
            ("strict", unmaps),
            ("defer", unmaps / 250),
            ("riommu", bursts),
            ("riommu-", bursts),
            ("riommu--paper", bursts),
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
