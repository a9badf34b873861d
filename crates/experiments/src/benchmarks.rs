//! The five benchmarks on both adapters in the modes of the rIOMMU paper: cycles per packet beyond
//! those of a packet without protection.

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{Apache, Memcached, NetperfStream, RequestResponse, Workload};

use super::allocators::W;
use super::capture::Capture;
use super::catalogue::Setting;
use super::finding::Measured;
use super::history::{HistoryCost, run_history};
use super::published::{Benchmark, Nic};
use super::stream::{in_turns_of, last};
use super::timed::{Cost, CountedSteps, TimedSubject};
use ringfence_lab::LabError;

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
    let runs = (0..setting.runs.clamp(2, 3)).map(|_| capture.run());
    let runs = runs.collect::<Result<Vec<_>, _>>()?;
    let subjects = MODES
        .map(TimedSubject::from_name)
        .into_iter()
        .collect::<Result<_, _>>()?;
    let packets = runs.last().map_or(1, |run| run.traffic.packets);
    let sides = [(None, 1), (None, W)];
    let aged = run_history(setting.history, &mut capture, &runs, &sides)?;
    let [strict, defer] = aged.as_slice() else {
        return Err(LabError::Internal("two histories"));
    };
    let price = setting.profile.invalidation_cycles as f64;
    let mut cycles = Vec::new();
    for (mode, costs) in MODES
        .into_iter()
        .zip(in_turns_of(setting, &runs, subjects, counted)?)
    {
        let aged = match mode {
            "strict" => Some(strict),
            "defer" => Some(defer),
            _ => None,
        };
        cycles.push((mode, per_frame(&last(&costs)?, aged, price, packets)));
    }
    Ok(Extra {
        cycles,
        steps: strict.steps,
    })
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
    use super::super::history::CallCycles;
    use super::*;

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
