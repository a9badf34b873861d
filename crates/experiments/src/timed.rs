//! Timed replays of the DMA layer under a workload. Plans drive the layer without devices; the
//! replay measures cycles and counts invalidations, which the profile models.

#[cfg(test)]
mod by_hand;
mod cost;
mod replica;
mod steps;

use ringfence_dma::flush::Burst;
use ringfence_dma::ring::Ring;
use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::meter::{Clock, EmptyLoop};
use ringfence_lab::mode_dispatch::dispatch_static;
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::Plan;
use ringfence_memory::{Arena, WriteBack};
use ringfence_papers::{BurstAsPublished, RingAsPublished};
use ringfence_pgtable::Coherency;

use super::capture::Run;
#[cfg(test)]
pub(super) use by_hand::{with_costs, with_costs_of};
pub(super) use cost::{Cost, sum_of_medians};
use replica::{MakeArena, MakeReplica, Replica, rings};
use steps::Block;
pub(super) use steps::CountedSteps;

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

    /// Coherency of the subject's tables on a machine with `profile`. The rings state theirs.
    pub(super) fn coherency(&self, profile: &Profile) -> Coherency {
        match self {
            Self::Mode(_) => profile.coherency(),
            Self::Rings => Coherency::Coherent,
            Self::RingsNonCoherent | Self::RingsAsPublishedNonCoherent => Coherency::NonCoherent,
        }
    }
}

/// Replicas of one subject, one for each repetition. All of them perform the same runs.
pub(super) struct TimedReplays {
    subject: TimedSubject,
    replicas: Vec<Replica>,
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
        let arena = |bytes| Arena::with_write_back(bytes, write_back);
        Self::with_arenas(subject, profile, repetitions, &arena)
    }

    /// Like [`new`](Self::new), with the arenas that `arena` creates.
    ///
    /// # Errors
    /// As for [`new`](Self::new), or the error of `arena`.
    fn with_arenas(
        subject: TimedSubject,
        profile: &Profile,
        repetitions: usize,
        arena: MakeArena<'_>,
    ) -> Result<Self, LabError> {
        // Burst limit: more unmaps than a burst of any experiment has.
        const LONGEST: usize = 4096;
        let coherency = subject.coherency(profile);
        let make = || match &subject {
            TimedSubject::Mode(mode) => dispatch_static(mode, MakeReplica { coherency, arena })?,
            TimedSubject::Rings | TimedSubject::RingsNonCoherent => {
                let burst = Burst::new(LONGEST);
                rings::<Ring, _>(coherency, arena, burst)
            }
            TimedSubject::RingsAsPublishedNonCoherent => {
                rings::<RingAsPublished, _>(coherency, arena, BurstAsPublished)
            }
        };
        let replicas = (0..repetitions.max(1)).map(|_| make());
        Ok(Self {
            replicas: replicas.collect::<Result<_, _>>()?,
            subject,
        })
    }

    /// Returns the instruction of each replica that writes lines back.
    #[cfg(test)]
    pub(super) fn write_backs(&self) -> Vec<WriteBack> {
        let arenas = self.replicas.iter().map(|it| &it.replay.platform().arena);
        arenas.map(|arena| arena.write_back_kind()).collect()
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
    let mut invalidations = vec![0; subjects.len()];
    #[cfg(test)]
    let mut ran = vec![None; subjects.len()];
    let longest = subjects.iter().map(|subject| subject.replicas.len()).max();
    let blocks = turns(subjects.len(), longest.unwrap_or(0), |index, repetition| {
        let TimedReplays { subject, replicas } = &mut subjects[index];
        let Some(replica) = replicas.get_mut(repetition) else {
            return Ok(None);
        };
        let mut clock = Clock::blocks();
        invalidations[index] = replica.drive(plan(subject).0, &parts, &mut clock)?;
        #[cfg(test)]
        {
            ran[index] = Some(subject.clone());
        }
        Ok(Some(clock.blocks))
    })?;
    let all = subjects.iter().zip(&blocks).zip(invalidations);
    let cost = |((subject, blocks), invalidations): ((&TimedReplays, &Vec<Vec<u64>>), u64)| {
        let (plan, own) = plan(&subject.subject);
        Cost::of(blocks, plan, own, invalidations)
    };
    let costs: Vec<_> = all.map(cost).collect();
    #[cfg(test)]
    let costs = by_hand::replace(costs, subjects, run, &parts)
        .into_iter()
        .zip(ran)
        .map(|(cost, subject)| Cost { subject, ..cost })
        .collect();
    Ok(costs)
}

/// Runs each of `count` subjects once a repetition, each time beginning with the next one. Returns
/// the results of each subject in the order of its repetitions.
fn turns<T>(
    count: usize,
    repetitions: usize,
    mut run: impl FnMut(usize, usize) -> Result<Option<T>, LabError>,
) -> Result<Vec<Vec<T>>, LabError> {
    let mut results: Vec<Vec<T>> = (0..count).map(|_| Vec::new()).collect();
    for repetition in 0..repetitions {
        for turn in 0..count {
            let index = (turn + repetition) % count;
            results[index].extend(run(index, repetition)?);
        }
    }
    Ok(results)
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
    use std::sync::atomic::Ordering;

    use ringfence_devices::nic::NicProfile;
    use ringfence_devices::workload::{NetperfStream, RequestResponse};
    use ringfence_lab::plan::Step;
    use ringfence_types::{PhysAddr, PhysMemory};

    use super::replica::tests::{replay_of_paged, type_of};
    use super::*;

    /// Returns the number of words other than 0 in the first pages of tables.
    fn words_of_tables(memory: &Arena) -> usize {
        let addresses = (0x2000..0x10_0000).step_by(8).map(PhysAddr::new);
        let words = addresses.map(|at| memory.word(at).unwrap());
        words
            .filter(|word| word.load(Ordering::Relaxed) != 0)
            .count()
    }

    /// Each subject gets its own results, in the order of its repetitions, and each repetition
    /// begins with another subject.
    #[test]
    fn subjects_take_turns_and_keep_their_own_results() {
        let mut order = Vec::new();
        let results = turns(3, 4, |index, repetition| {
            order.push(index);
            Ok((index != 2 || repetition < 2).then_some((index, repetition)))
        });
        assert_eq!(
            results.unwrap(),
            [
                vec![(0, 0), (0, 1), (0, 2), (0, 3)],
                vec![(1, 0), (1, 1), (1, 2), (1, 3)],
                vec![(2, 0), (2, 1)],
            ]
        );
        assert_eq!(order, [0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2]);
    }

    /// The cycles of a run are the medians of its blocks without the loop's own; each repetition
    /// keeps its sum.
    #[test]
    fn a_cost_is_the_median_of_each_block() {
        let plan = Plan {
            maps: 7,
            unmaps: 9,
            ..Plan::default()
        };
        let repetitions = [vec![10, 30], vec![14, 20], vec![12, 40]];
        let cost = Cost::of(&repetitions, &plan, 5.0, 3);
        assert_eq!(
            cost,
            Cost {
                measured: 12.0 + 30.0 - 5.0,
                repetitions: vec![35.0, 29.0, 47.0],
                spread: 18.0,
                invalidations: 3,
                pairs: 9,
                subject: None,
            }
        );
    }
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
        let mut rings = left_out.flat_map(|block| &run.step_rings[block.range.clone()]);
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
    fn each_name_is_a_subject_of_its_own() {
        for (name, wanted) in [
            ("riommu", TimedSubject::Rings),
            ("riommu-", TimedSubject::RingsNonCoherent),
            ("riommu--paper", TimedSubject::RingsAsPublishedNonCoherent),
        ] {
            assert_eq!(TimedSubject::from_name(name).unwrap(), wanted, "{name}");
        }
        for name in ["none", "strict", "strict+", "defer", "defer+"] {
            let subject = TimedSubject::from_name(name).unwrap();
            assert!(
                matches!(&subject, TimedSubject::Mode(mode) if mode.name == name),
                "{name}: {subject:?}"
            );
        }
    }

    /// The replicas of a subject, and its cost, are its own.
    #[test]
    fn costs_are_those_of_the_subjects_that_ran() {
        let mut capture = Capture::with(NicProfile::BRCM, RequestResponse::default(), 1, 64);
        let run = capture.as_mut().unwrap().run().unwrap();
        let names = ["strict", "strict+", "defer", "defer+"];
        let subjects = names.map(|name| TimedSubject::from_name(name).unwrap());
        let mut timed = subjects
            .clone()
            .map(|subject| TimedReplays::new(subject, &Profile::r210_2015(), 1).unwrap());
        for (name, replays) in names.iter().zip(&timed) {
            let found = type_of(&replays.replicas[0]);
            assert_eq!(found, replay_of_paged(name), "{name}");
        }
        let costs = run_in_turns(&mut timed, &run, CountedSteps::All).unwrap();
        let ran = costs.into_iter().map(|cost| cost.subject.unwrap());
        assert_eq!(ran.collect::<Vec<_>>(), subjects);
    }

    #[test]
    fn only_riommu_snoops_where_walks_do_not() {
        use Coherency::{Coherent, NonCoherent};
        let mut profile = Profile::r210_2015();
        for (coherent, mode) in [(false, NonCoherent), (true, Coherent)] {
            profile.coherent = coherent;
            for (name, wanted) in [
                ("strict", mode),
                ("strict+", mode),
                ("defer", mode),
                ("defer+", mode),
                ("riommu-", NonCoherent),
                ("riommu--paper", NonCoherent),
                ("riommu", Coherent),
            ] {
                let subject = TimedSubject::from_name(name).unwrap();
                assert_eq!(subject.coherency(&profile), wanted, "{name}");
            }
        }
    }

    /// A device that does not snoop sees the tables of non-coherent subjects only.
    #[test]
    fn tables_are_written_back_unless_walks_snoop() {
        let workload = RequestResponse::default();
        let mut capture = Capture::with(NicProfile::BRCM, workload, 1, 64).unwrap();
        let run = capture.run().unwrap();
        let mut profile = Profile::r210_2015();
        for (coherent, name, wanted) in [
            (false, "strict", true),
            (true, "strict", false),
            (false, "defer+", true),
            (true, "defer+", false),
            (false, "riommu", false),
            (true, "riommu-", true),
            (true, "riommu--paper", true),
        ] {
            profile.coherent = coherent;
            let subject = TimedSubject::from_name(name).unwrap();
            let arena = &Arena::with_device_view;
            let mut timed = TimedReplays::with_arenas(subject, &profile, 1, arena).unwrap();
            timed.run(&run).unwrap();
            let memory = &timed.replicas[0].replay.platform().arena;
            let view = memory.device_view().unwrap().memory();
            let [own, seen] = [memory, view].map(words_of_tables);
            assert!(own > 0, "{name}");
            assert_eq!(seen > 0, wanted, "{name}: {seen} of {own} words");
        }
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
