//! What the experiments about allocators have in common: mlx, stream, many runs on one interface, and throughput by the model.

use ringfence_devices::nic::Profile as Adapter;
use ringfence_devices::workload::Stream;
use ringfence_iova::Capacity;

use super::allocators::{Counts, Driven};
use super::capture::{Capture, Run};
use super::catalogue::Setting;
use super::finding::Measured;
use super::model::{cycles_per_packet, gbps};
use super::printed::{C_NONE, CLOCK_GHZ, IOVAS_PER_PACKET};
use super::timed::{Cost, Subject, Timed};
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

/// The documents' runs of stream on mlx.
///
/// # Errors
/// The workload cannot go on.
pub(super) fn runs(setting: &Setting) -> Result<Vec<Run>, LabError> {
    let mut capture = Capture::new(Adapter::MLX, Stream::default())?;
    (0..setting.runs.max(1)).map(|_| capture.run()).collect()
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
    let mut driven = Driven::new(size, batch)?;
    runs.iter()
        .map(|run| driven.run(&run.plan, |_| {}))
        .collect()
}

/// Costs of each run in a mode of Linux 3.4 with freelists of `size`.
///
/// # Errors
/// No memory.
pub(super) fn timed(
    setting: &Setting,
    runs: &[Run],
    size: Option<Capacity>,
    flush: FlushKind,
) -> Result<Vec<Cost>, LabError> {
    let base = Mode::find("strict").ok_or(LabError::Internal("mode strict"))?;
    let mode = Mode {
        name: name(size),
        alloc: match size {
            None => Alloc::CachedRbTree,
            Some(Capacity::AtMost(k)) => Alloc::Eiovar(Some(k)),
            Some(Capacity::Unbounded) => Alloc::Eiovar(None),
        },
        flush,
        ..base
    };
    let mut timed = Timed::new(Subject::Mode(mode), &setting.profile, setting.repetitions)?;
    runs.iter().map(|run| timed.run(run)).collect()
}

/// Cycles of a packet whose buffers cost that much.
pub(super) fn packet(cost: &Cost, profile: &Profile) -> Measured {
    let executed = IOVAS_PER_PACKET * cost.executed_per_pair();
    let charged = cycles_per_packet(
        C_NONE,
        IOVAS_PER_PACKET,
        0.0,
        cost.charged_per_pair(profile),
    );
    Measured::cost(executed, charged, cost.spread)
}

/// Throughput in Gbit/s of the documents' clock by the model, with the spread of the cost.
pub(super) fn throughput(cost: &Cost, profile: &Profile) -> Measured {
    let packet = packet(cost, profile);
    let share = packet.executed.unwrap_or(0.0) / packet.median;
    Measured::timed(gbps(CLOCK_GHZ, packet.median), cost.spread * share)
}

/// The last of them.
///
/// # Errors
/// There are none.
pub(super) fn last<T: Copy>(of: &[T]) -> Result<T, LabError> {
    of.last().copied().ok_or(LabError::Internal("no runs"))
}

/// Runs and a number of each, as points.
pub(super) fn by_run(numbers: impl Iterator<Item = f64>) -> Vec<(f64, f64)> {
    (1..).map(f64::from).zip(numbers).collect()
}
