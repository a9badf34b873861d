//! The five benchmarks on both adapters in the modes of the rIOMMU paper: cycles per packet beyond
//! those of a packet without protection.

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{Apache, Memcached, NetperfStream, RequestResponse, Workload};

use super::allocators::W;
use super::capture::{Capture, Run};
use super::finding::Measured;
use super::history::{HistoryCost, run_history};
use super::published::{Benchmark, Nic};
use super::setting::Setting;
use super::stream::{in_turns_of, last};
use super::timed::{Cost, CountedSteps, TimedSubject};
use ringfence_lab::LabError;
use ringfence_lab::meter::cycles;

/// The modes other than `none`, in the order of the paper's tables.
pub(super) const MODES: [&str; 6] = ["strict", "strict+", "defer", "defer+", "riommu-", "riommu"];

/// Adapter of the paper's machines with `nic`.
pub(super) fn adapter(nic: Nic) -> NicProfile {
    match nic {
        Nic::Mlx => NicProfile::MLX,
        Nic::Brcm => NicProfile::BRCM,
    }
}

/// The benchmark with the rIOMMU paper's parameters.
pub(super) fn workload(benchmark: Benchmark) -> Box<dyn Workload> {
    match benchmark {
        Benchmark::Stream => Box::new(NetperfStream::default()),
        Benchmark::Rr => Box::new(RequestResponse::default()),
        Benchmark::Apache1M => Box::new(Apache::new(Apache::BIG, Apache::CLIENTS, 1)),
        Benchmark::Apache1K => Box::new(Apache::new(Apache::SMALL, Apache::CLIENTS, 1)),
        Benchmark::Memcached => Box::new(Memcached::new(Memcached::CLIENTS, 1)),
    }
}

/// Costs of a benchmark.
#[derive(Debug)]
pub(super) struct Extra {
    /// Cycles per frame in each of [`MODES`], beyond those without protection.
    pub(super) cycles: Vec<(&'static str, Measured)>,
    /// Mean search steps of an allocation in strict, in the last run of the history.
    pub(super) steps: f64,
}

/// Cycles per frame in each of [`MODES`], beyond those without protection. The layer is timed over
/// the first runs. Its allocator without freelists goes on, alone, to the end of the setting's
/// history, and what an allocation takes more there is added to `strict` and `defer`. Only the
/// steps in `counted` cost anything.
///
/// # Errors
/// The workload cannot continue, or memory is exhausted.
pub(super) fn extra(
    setting: &Setting,
    nic: Nic,
    benchmark: Benchmark,
    counted: CountedSteps,
) -> Result<Extra, LabError> {
    let adapter = adapter(nic);
    let workload = workload(benchmark);
    let mut capture = Capture::with(adapter, workload, adapter.rx_frames, setting.packets)?;
    let runs = (0..timed_first(setting)).map(|_| capture.run());
    let runs = runs.collect::<Result<Vec<_>, _>>()?;
    let packets = runs.last().map_or(1, |run| run.traffic.packets);
    let aged = histories(setting.history, &mut capture, &runs)?;
    let price = setting.profile.invalidation_cycles as f64;
    let costs = in_turns_of(setting, &runs, subjects()?, counted)?;
    Ok(Extra {
        cycles: cycles_of(&costs, &aged, price, packets)?,
        steps: aged[0].steps,
    })
}

/// Subjects of [`MODES`], in their order.
fn subjects() -> Result<Vec<TimedSubject>, LabError> {
    MODES.into_iter().map(TimedSubject::from_name).collect()
}

/// Number of runs that the layer is timed over.
pub(super) fn timed_first(setting: &Setting) -> usize {
    setting.runs.clamp(2, 3)
}

/// Modes whose allocator has no freelists, and number of unmaps that free together.
const WITHOUT_LISTS: [(&str, usize); 2] = [("strict", 1), ("defer", W)];

/// Histories of the allocators of [`WITHOUT_LISTS`], after the runs `first`.
fn histories<L: Workload>(
    history: usize,
    capture: &mut Capture<L>,
    first: &[Run],
) -> Result<[HistoryCost; 2], LabError> {
    let sides = WITHOUT_LISTS.map(|(_, batch)| (None, batch));
    let aged = run_history(history, capture, first, &sides, &cycles)?;
    let aged = aged.try_into();
    aged.map_err(|_| LabError::Internal("two histories"))
}

/// Cycles per frame in each of [`MODES`], from the costs of its runs; the last run counts. `aged`
/// has the histories of [`WITHOUT_LISTS`].
fn cycles_of(
    costs: &[Vec<Cost>],
    aged: &[HistoryCost; 2],
    price: f64,
    packets: u64,
) -> Result<Vec<(&'static str, Measured)>, LabError> {
    let of = |(mode, costs): (&'static str, &Vec<Cost>)| {
        let index = WITHOUT_LISTS.iter().position(|(name, _)| *name == mode);
        let aged = index.and_then(|index| aged.get(index));
        Ok((mode, per_frame(&last(costs)?, aged, price, packets)))
    };
    MODES.into_iter().zip(costs).map(of).collect()
}

/// Cycles per frame of a run of `packets` frames that costs `cost`, with the cycles that the
/// history of `aged` adds to each allocation. An invalidation takes `price` cycles.
fn per_frame(cost: &Cost, aged: Option<&HistoryCost>, price: f64, packets: u64) -> Measured {
    let packets = packets.max(1) as f64;
    let modelled = cost.invalidations as f64 * price;
    let (age, age_spread) = aged.map_or((0.0, 0.0), |of| (of.added(), of.spread));
    let pairs = cost.pairs as f64;
    let cycles = (cost.measured + age * pairs).max(0.0);
    Measured::cost(cycles / packets, modelled / packets, 0.0)
        .with_spread((cost.spread + age_spread * pairs) / packets)
}

#[cfg(test)]
mod tests {
    use super::super::allocators::DrivenAllocator;
    use super::super::history::CallCycles;
    use super::super::history::by_hand::with_histories;
    use super::super::timed::with_costs;
    use super::*;
    use ringfence_lab::modes::Mode;

    #[test]
    fn each_mode_is_timed_under_its_own_name() {
        let mode = |name| TimedSubject::Mode(Mode::find(name).unwrap());
        let wanted = [
            mode("strict"),
            mode("strict+"),
            mode("defer"),
            mode("defer+"),
            TimedSubject::RingsNonCoherent,
            TimedSubject::Rings,
        ];
        assert_eq!(subjects().unwrap(), wanted);
        let names = ["strict", "strict+", "defer", "defer+", "riommu-", "riommu"];
        assert_eq!(MODES, names);
    }

    /// Each mode has the cost of its last run, and only the tree without freelists a history.
    #[test]
    fn each_mode_has_its_last_run_and_its_history() {
        let cost = |measured, invalidations| Cost {
            measured,
            invalidations,
            pairs: 10,
            ..Cost::default()
        };
        let costs: Vec<Vec<Cost>> = (1..=6_u32)
            .map(|mode| vec![cost(9.0, 99), cost(f64::from(mode) * 1000.0, mode.into())])
            .collect();
        let aged = [50.0, 7.0].map(|alloc| HistoryCost {
            aged: CallCycles { alloc, free: 0.0 },
            ..HistoryCost::default()
        });
        let found = cycles_of(&costs, &aged, 100.0, 5).unwrap();
        let found: Vec<_> = found
            .into_iter()
            .map(|(mode, of)| (mode, of.measured_part, of.modelled_part))
            .collect();
        let of = |mode, measured, modelled| (mode, Some(measured), Some(modelled));
        let wanted = [
            // Ten allocations of 50 and of 7 more cycles, over five frames.
            of("strict", 200.0 + 100.0, 20.0),
            of("strict+", 400.0, 40.0),
            of("defer", 600.0 + 14.0, 60.0),
            of("defer+", 800.0, 80.0),
            of("riommu-", 1000.0, 100.0),
            of("riommu", 1200.0, 120.0),
        ];
        assert_eq!(found, wanted);
    }

    /// The histories of `strict` and `defer` add to each allocation, in X03 and in X04.
    #[test]
    fn costs_of_the_workloads_have_their_histories() {
        // Each mode has a cost of its own.
        let costs = [900.0, 800.0, 700.0, 600.0, 500.0, 400.0];
        let modes: [_; 6] = std::array::from_fn(|index| (MODES[index], costs[index]));
        let calls = |alloc| CallCycles { alloc, free: 9.0 };
        let history = |fresh, aged, steps| HistoryCost {
            steps,
            fresh: calls(fresh),
            aged: calls(aged),
            ..HistoryCost::default()
        };
        let setting = Setting::smoke();
        for counted in [CountedSteps::All, CountedSteps::UntilReply] {
            let of = |histories: [HistoryCost; 2]| {
                let run = || extra(&setting, Nic::Mlx, Benchmark::Rr, counted);
                let run = || with_costs(&modes, run);
                let found = with_histories(&histories, run).unwrap();
                let cycles = found.cycles.into_iter();
                let cycles = cycles.map(|(mode, of)| (mode, of.measured_part.unwrap()));
                (cycles.collect::<Vec<_>>(), found.steps)
            };
            let (without, steps) = of([history(40.0, 40.0, 3.0), history(7.0, 7.0, 5.0)]);
            assert_eq!(steps, 3.0);
            let (with, _) = of([history(40.0, 540.0, 3.0), history(7.0, 257.0, 5.0)]);
            // Frames have the same maps and unmaps in all modes.
            let (first, cost) = (without[0].1, modes[0].1);
            for ((mode, of), (name, other)) in without.iter().zip(&modes) {
                assert_eq!(mode, name);
                assert!((of / first - other / cost).abs() < 1e-9, "{mode}: {of}");
            }
            for ((mode, with), (_, without)) in with.into_iter().zip(without) {
                let each = match mode {
                    "strict" => 500.0,
                    "defer" => 250.0,
                    _ => 0.0,
                };
                // A frame has one map; a run has a few more than its frames.
                let maps = (with - without) / each;
                let holds = (1.0..1.01).contains(&maps) || (each == 0.0 && with == without);
                assert!(holds, "{mode}: {with} and {without}");
            }
        }
    }

    #[test]
    fn histories_free_in_the_batches_of_their_modes() {
        let captured = || {
            let nic = NicProfile::BRCM;
            Capture::with(nic, RequestResponse::default(), nic.rx_frames, 1024).unwrap()
        };
        let mut capture = captured();
        let first = [capture.run().unwrap(), capture.run().unwrap()];
        let found = histories(5, &mut capture, &first).unwrap();
        // The same runs again, by hand.
        let mut capture = captured();
        let runs: Vec<Run> = (0..5).map(|_| capture.run().unwrap()).collect();
        let steps = [1, 250].map(|batch| {
            let mut alone = DrivenAllocator::new(None, batch).unwrap();
            let runs = runs.iter();
            let steps = runs.map(|run| alone.run(&run.plan, |_| {}).unwrap().mean_steps());
            steps.last().unwrap()
        });
        assert_eq!(found.map(|of| of.steps), steps);
        assert!(steps[0] != steps[1], "{steps:?}");
    }

    #[test]
    fn a_history_adds_to_each_allocation() {
        let cost = Cost {
            measured: 1000.0,
            spread: 20.0,
            invalidations: 3,
            pairs: 10,
            ..Cost::default()
        };
        let aged = |fresh, alloc| {
            let calls = |alloc| CallCycles { alloc, free: 9.0 };
            HistoryCost {
                fresh: calls(fresh),
                aged: calls(alloc),
                spread: 2.0,
                free_spread: 7.0,
                ..HistoryCost::default()
            }
        };
        for (aged, measured_part, spread) in [
            (None, 200.0, 4.0),
            // 50 cycles more for each of ten allocations, over five frames.
            (Some(aged(90.0, 140.0)), 300.0, 8.0),
            (Some(aged(90.0, 80.0)), 180.0, 8.0),
            (Some(aged(900.0, 80.0)), 0.0, 8.0),
        ] {
            let found = per_frame(&cost, aged.as_ref(), 2150.0, 5);
            let wanted = Measured::cost(measured_part, 1290.0, 0.0).with_spread(spread);
            assert_eq!(found, wanted, "{aged:?}");
        }
    }
}
