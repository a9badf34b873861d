//! What the experiments about allocators have in common: mlx, stream, many runs on one interface,
//! and throughput by the model.

use ringfence_devices::nic::Profile as Adapter;
use ringfence_devices::workload::{BURST, NetperfStream};
use ringfence_iova::Capacity;

use super::allocators::{Counts, DrivenAllocator};
use super::capture::{Capture, Run};
use super::catalogue::Setting;
use super::finding::{Measured, median};
use super::model::{cycles_per_packet, gbps};
use super::published::{BASELINE_CYCLES, CLOCK_GHZ, IOVAS_PER_PACKET};
use super::timed::{Cost, TimedReplays, TimedSubject, run_in_turns};
use crate::Profile;
use crate::error::LabError;
use crate::modes::{Alloc, FlushKind, Mode};

/// Sizes of the freelists that EIOVAR plots, and no lists.
pub(super) const SIZES: [Option<Capacity>; 6] = [
    None,
    Some(Capacity::AtMost(1)),
    Some(Capacity::AtMost(8)),
    Some(Capacity::AtMost(64)),
    Some(Capacity::AtMost(512)),
    Some(Capacity::Unbounded),
];

/// How a plot calls them.
pub(super) fn name(size: Option<Capacity>) -> String {
    match size {
        None => "baseline".into(),
        Some(Capacity::AtMost(k)) => format!("eiovar_{k}"),
        Some(Capacity::Unbounded) => "eiovar_inf".into(),
    }
}

/// Longest bursts, of received packets and of acknowledgements sent, beside the default of 200.
pub(super) const BURSTS: [u32; 4] = [BURST, 50, 10, 1];

/// The documents' runs of stream on mlx.
///
/// # Errors
/// The workload cannot go on.
pub(super) fn runs(setting: &Setting) -> Result<Vec<Run>, LabError> {
    let mut capture = capture(setting, BURST)?;
    (0..setting.runs.max(1)).map(|_| capture.run()).collect()
}

/// A station under stream on mlx, whose interrupts come at `burst` completions.
///
/// # Errors
/// The port does not open.
pub(super) fn capture(setting: &Setting, burst: u32) -> Result<Capture<NetperfStream>, LabError> {
    Capture::with(
        Adapter::MLX,
        NetperfStream::default(),
        burst,
        setting.packets,
    )
}

/// Counts of each run.
///
/// # Errors
/// The space is exhausted.
pub(super) fn counted(
    runs: &[Run],
    size: Option<Capacity>,
    batch: usize,
) -> Result<Vec<Counts>, LabError> {
    let mut driven = DrivenAllocator::new(size, batch)?;
    runs.iter()
        .map(|run| driven.run(&run.plan, |_| {}))
        .collect()
}

/// Linux 3.4's mode with freelists of `size`.
fn mode(size: Option<Capacity>, flush: FlushKind) -> Result<Mode, LabError> {
    let base = Mode::find("strict").ok_or(LabError::Internal("mode strict"))?;
    Ok(Mode {
        name: name(size),
        alloc: match size {
            None => Alloc::CachedRbTree,
            Some(Capacity::AtMost(k)) => Alloc::Eiovar(Some(k)),
            Some(Capacity::Unbounded) => Alloc::Eiovar(None),
        },
        flush,
        ..base
    })
}

/// Costs of each run with freelists of each of `sizes`: by size, then by run.
///
/// # Errors
/// No memory.
pub(super) fn timed(
    setting: &Setting,
    runs: &[Run],
    sizes: &[Option<Capacity>],
    flush: FlushKind,
) -> Result<Vec<Vec<Cost>>, LabError> {
    let subjects = sizes
        .iter()
        .map(|size| Ok(TimedSubject::Mode(mode(*size, flush)?)));
    in_turns(
        setting,
        runs,
        subjects.collect::<Result<Vec<_>, LabError>>()?,
    )
}

/// Costs of each run with each of `subjects`, which take turns: by subject, then by run.
///
/// # Errors
/// No memory, or a map was refused.
pub(super) fn in_turns(
    setting: &Setting,
    runs: &[Run],
    subjects: Vec<TimedSubject>,
) -> Result<Vec<Vec<Cost>>, LabError> {
    let (profile, repetitions) = (&setting.profile, setting.repetitions);
    let subjects = subjects.into_iter();
    let mut timed = subjects
        .map(|subject| TimedReplays::new(subject, profile, repetitions))
        .collect::<Result<Vec<_>, _>>()?;
    let mut costs = vec![Vec::new(); timed.len()];
    for run in runs {
        for (costs, cost) in costs.iter_mut().zip(run_in_turns(&mut timed, run)?) {
            costs.push(cost);
        }
    }
    Ok(costs)
}

/// Cycles of a packet whose buffers cost that much.
pub(super) fn packet(cost: &Cost, profile: &Profile) -> Measured {
    let executed = IOVAS_PER_PACKET * cost.measured_per_pair();
    let charged = cycles_per_packet(
        BASELINE_CYCLES,
        IOVAS_PER_PACKET,
        0.0,
        cost.modelled_per_pair(profile),
    );
    Measured::cost(executed, charged, cost.spread)
}

/// Cycles of a packet in each repetition by itself.
pub(super) fn packets(cost: &Cost, profile: &Profile) -> Vec<f64> {
    let each = cost.each_per_pair(profile).into_iter();
    each.map(|pair| cycles_per_packet(BASELINE_CYCLES, IOVAS_PER_PACKET, pair, 0.0))
        .collect()
}

/// Throughput in Gbit/s of the documents' clock by the model, with the spread of the repetitions.
pub(super) fn throughput(cost: &Cost, profile: &Profile) -> Measured {
    let speeds = packets(cost, profile).into_iter();
    let speeds: Vec<f64> = speeds.map(|cycles| gbps(CLOCK_GHZ, cycles)).collect();
    let median_of_blocks = gbps(CLOCK_GHZ, packet(cost, profile).median);
    Measured::timed(median_of_blocks, median(&speeds).1)
}

/// Throughput of `one` over that of `other`, with the spread of that ratio over the repetitions.
pub(super) fn relative_throughput(one: &Cost, other: &Cost, profile: &Profile) -> Measured {
    let pairs = packets(one, profile)
        .into_iter()
        .zip(packets(other, profile));
    let ratios: Vec<f64> = pairs.map(|(one, other)| other / one).collect();
    let median_of_blocks = packet(other, profile).median / packet(one, profile).median;
    Measured::timed(median_of_blocks, median(&ratios).1)
}

/// The last of them.
///
/// # Errors
/// There are none.
pub(super) fn last<T: Clone>(of: &[T]) -> Result<T, LabError> {
    of.last().cloned().ok_or(LabError::Internal("no runs"))
}

/// Runs and a number of each, as points.
pub(super) fn by_run(numbers: impl Iterator<Item = f64>) -> Vec<(f64, f64)> {
    (1..).map(f64::from).zip(numbers).collect()
}
