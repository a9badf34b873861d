//! Replays one trace in several modes and builds a row for each.

use std::io::Read;

use ringfence_trace::{Chunk, Devices, Operations, Summary, TraceError};

use crate::agreement::{Agreement, AgreementCheck, AgreementOptions};
use crate::error::LabError;
use crate::hybrid::withholds;
use crate::machine::Prices;
use crate::modes::Mode;
use crate::plan::{Planner, each_plan_with};
use crate::replay::Outcomes;
use crate::round_trips::RoundTripFinder;
use crate::row::{Row, RowInputs};
use crate::status::ReplayStatus;

pub use crate::options::CompareOptions;
pub use crate::runner::{OracleReplay, Runner, meter, non_coherent_testbed, runner, testbed};

/// The result of a comparison.
#[derive(Debug)]
pub struct Comparison {
    /// One row for each mode.
    pub rows: Vec<Row>,
    /// Agreement of the recorded addresses with the model; `None` beyond a limit. The reader must
    /// keep addresses.
    pub agreement: Option<Agreement>,
    /// Trace events that the reader dropped or changed.
    pub summary: Summary,
    /// Names of the devices.
    pub devices: Vec<String>,
    /// Trace lines that the replay covers.
    pub lines: u64,
    /// Number of bursts of unmaps.
    pub bursts: u64,
    /// Bursts ended because a withheld page was mapped again.
    pub bursts_cut_by_map: u64,
}

/// Replays a trace in every mode of `options`. Modes alternate chunk by chunk, so neither a long
/// trace nor machine noise favours one of them. Calls `progress` with the number of lines replayed
/// so far.
///
/// # Errors
/// The trace is malformed or exceeds a limit, it does not name a device of `options`, or a mode
/// cannot be built. [`TraceError::Interrupted`] if the [`Interrupt`](ringfence_trace::Interrupt) of
/// the trace's options ends the replay.
pub fn compare<R: Read>(
    name: &str,
    mut operations: Operations<R>,
    options: &CompareOptions,
    mut progress: impl FnMut(u64),
) -> Result<Comparison, LabError> {
    let mut runners = Vec::with_capacity(options.modes.len());
    for mode in &options.modes {
        runners.push(runner(mode, options)?);
    }
    let planner = Planner::new().with_limits(options.limits);
    let withheld = options
        .modes
        .iter()
        .filter_map(|mode| withholds(mode, &options.profile));
    let mut planner = withheld.fold(planner, Planner::with_descriptors_of);
    if options.modes.iter().any(Mode::has_rings) {
        planner = planner.with_doorbells();
    }
    if options.contiguous_frames {
        planner = planner.with_contiguous_frames();
    }
    let cycling = options
        .modes
        .iter()
        .filter_map(|mode| options.cache_cycles.for_mode(mode));
    let mut planner = planner.with_cycles(cycling);
    let mut lines = 0;
    let mut round_trips = RoundTripFinder::default();
    let only = options.devices.as_deref();
    // A trace over a limit of the check is compared without it; the replays have limits of their
    // own.
    let mut check = Some(AgreementCheck::new(AgreementOptions {
        limits: options.limits,
        ..AgreementOptions::default()
    }));
    let interrupt = operations.interrupt().clone();
    each_plan_with(
        &mut operations,
        &mut planner,
        only,
        |chunk, devices| {
            let done = check.as_mut().map(|check| check.chunk(chunk, devices));
            if matches!(done, Some(Err(_))) {
                check = None;
            }
        },
        |planner, plan, devices| {
            lines += plan.lines;
            round_trips.observe(plan);
            if planner.live_pages_max > options.timed_pages() {
                for runner in &mut runners {
                    runner.meter = None;
                }
            }
            for runner in &mut runners {
                if interrupt.is_set() {
                    let file = name.to_owned();
                    return Err(TraceError::Interrupted { file }.into());
                }
                runner.metered.run(plan, devices)?;
                if let Some(hostile) = &mut runner.attack {
                    hostile.run(plan, devices)?;
                }
                if let Some(meter) = &mut runner.meter {
                    meter.chunk(plan)?;
                }
            }
            progress(lines);
            Ok(())
        },
    )?;
    if let Some(names) = &options.devices {
        known(name, operations.devices(), names)?;
    }
    let alive = planner.live_mappings();
    let summary = operations.summary().clone();
    let prices = options
        .prices
        .unwrap_or_else(|| Prices::from(&options.profile));
    let round_trips = round_trips.finish();
    let of_trace = status_of_trace(&summary, &planner);
    let mut rows = Vec::with_capacity(runners.len());
    for (mode, runner) in options.modes.iter().zip(&mut runners) {
        let metered = runner.metered.finish(&alive);
        let hostile = runner.attack.as_mut().map(|judge| judge.finish(&alive));
        let meter = runner.meter.as_ref();
        let components = meter.map(|meter| meter.finish());
        let status = if !of_trace.is_ok() && metered.first_refusal.is_none() {
            of_trace.clone()
        } else {
            let timed = match meter {
                None if options.repetitions > 0 => ReplayStatus::NotTimed {
                    bytes: planner.live_pages_max.saturating_mul(4096),
                },
                meter => meter
                    .and_then(|meter| meter.refusals())
                    .map_or(ReplayStatus::Ok, |(count, first)| {
                        ReplayStatus::RefusedInMeter { count, first }
                    }),
            };
            of_replay(&metered).unwrap_or(timed)
        };
        rows.push(Row::new(&RowInputs {
            trace: name,
            mode,
            iommu: options.profile.iommu,
            metered: &metered,
            attack: hostile.as_ref(),
            components,
            prices,
            round_trips,
            cache_cycles: options.cache_cycles,
            status,
        }));
    }
    Ok(Comparison {
        rows,
        agreement: check.map(|check| check.finish(&summary, operations.devices())),
        devices: operations
            .devices()
            .iter()
            .map(|(_, device)| device.name.clone())
            .collect(),
        summary,
        lines,
        bursts: planner.bursts(),
        bursts_cut_by_map: planner.bursts_cut_by_map(),
    })
}

/// Reads the trace until it has named every device in `names`. This is quicker than failing after a
/// replay.
///
/// # Errors
/// The trace is malformed, or it does not name a device.
pub fn check_devices<R: Read>(
    trace: &str,
    mut operations: Operations<R>,
    names: &[String],
) -> Result<(), LabError> {
    let mut chunk = Chunk::default();
    let all = |operations: &Operations<R>| known(trace, operations.devices(), names);
    while all(&operations).is_err() && operations.next_chunk(&mut chunk)? {}
    all(&operations)
}

fn known(trace: &str, devices: &Devices, names: &[String]) -> Result<(), LabError> {
    match names.iter().find(|name| devices.find(name).is_none()) {
        None => Ok(()),
        Some(name) => Err(LabError::NoSuchDevice {
            name: name.clone(),
            trace: trace.to_owned(),
            known: devices.iter().map(|(_, d)| d.name.clone()).collect(),
        }),
    }
}

/// Returns the status that the trace itself implies. Devices that are not replayed do not affect
/// it.
pub(crate) fn status_of_trace(summary: &Summary, planner: &Planner) -> ReplayStatus {
    if summary.lost > 0 {
        return ReplayStatus::LostEvents(summary.lost);
    }
    let mut skipping = summary.skipping_devices();
    if skipping.any(|device| planner.keeps(device)) {
        return ReplayStatus::SkipsUnmaps;
    }
    ReplayStatus::Ok
}

/// Returns the reason why a replay covers less than the trace; `None` if it covers all of it.
pub fn of_replay(outcomes: &Outcomes) -> Option<ReplayStatus> {
    if let Some(first) = outcomes.first_refusal {
        let count = outcomes.refused_maps;
        return Some(ReplayStatus::RefusedMaps { count, first });
    }
    if outcomes.not_flushed > 0 {
        return Some(ReplayStatus::NotFlushed(outcomes.not_flushed));
    }
    if outcomes.refused_unmaps > 0 {
        return Some(ReplayStatus::RefusedUnmaps(outcomes.refused_unmaps));
    }
    let stalled_out = outcomes.stalled_out;
    let wanted = outcomes.maps.saturating_add(stalled_out);
    (stalled_out > wanted / STALLED_OUT_DIVISOR).then_some(ReplayStatus::RingDoesNotFit {
        stalled_out,
        wanted,
    })
}

/// At most one map in this many may miss its slot without invalidating the row.
const STALLED_OUT_DIVISOR: u64 = 100;
