//! A trace through modes, side by side.

use std::io::Read;

use ringfence_trace::{Chunk, Operations, Summary};

use crate::Profile;
use crate::error::LabError;
use crate::modes::Mode;
use crate::plan::{Plan, Planner};
use crate::row::{Parts, Row};

pub use crate::runner::{Runner, meter, runner};

/// What to run, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The modes, in the order of the rows.
    pub modes: Vec<Mode>,
    /// Costs and geometry.
    pub profile: Profile,
    /// Names of the devices to replay; none means all.
    pub devices: Option<Vec<String>>,
    /// Timed repetitions; 0 leaves the meter out.
    pub repetitions: usize,
    /// Whether the hostile pass is run.
    pub hostile: bool,
}

impl Options {
    /// All named modes under the profile of the documents' machine.
    pub fn new() -> Self {
        Self {
            modes: Mode::named(),
            profile: Profile::r210_2015(),
            devices: None,
            repetitions: 3,
            hostile: true,
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

/// A comparison, complete.
#[derive(Debug)]
pub struct Comparison {
    /// One row a mode.
    pub rows: Vec<Row>,
    /// What was left out of the trace or bent.
    pub summary: Summary,
    /// Names of the devices.
    pub devices: Vec<String>,
    /// Lines of the trace that the replay stands for.
    pub lines: u64,
    /// Bursts of unmaps.
    pub bursts: u64,
    /// Bursts ended because a withheld page was mapped again.
    pub bursts_cut_by_map: u64,
}

/// Replays a trace in every mode of `options`, chunk by chunk and mode by mode, so that neither a long trace nor a noisy machine favours
/// one of them. `progress` is told the lines replayed so far.
///
/// # Errors
/// The trace is malformed, or a mode cannot be built.
pub fn compare<R: Read>(
    name: &str,
    mut operations: Operations<R>,
    options: &Options,
    mut progress: impl FnMut(u64),
) -> Result<Comparison, LabError> {
    let mut runners = Vec::with_capacity(options.modes.len());
    for mode in &options.modes {
        runners.push(runner(mode, options)?);
    }
    let mut planner = Planner::new();
    let mut chunk = Chunk::default();
    let mut plan = Plan::default();
    let mut lines = 0;
    let mut more = true;
    while more {
        more = operations.next_chunk(&mut chunk)?;
        if let Some(names) = &options.devices {
            planner.keep_only(operations.devices(), names);
        }
        planner.plan(&chunk, &mut plan);
        if !more {
            planner.finish(&mut plan);
        }
        lines += plan.lines;
        for runner in &mut runners {
            runner.metered.run(&plan, operations.devices())?;
            if let Some(hostile) = &mut runner.hostile {
                hostile.run(&plan, operations.devices())?;
            }
            if let Some(meter) = &mut runner.meter {
                meter.chunk(&plan)?;
            }
        }
        progress(lines);
    }
    if let Some(names) = &options.devices {
        for name in names {
            if operations.devices().find(name).is_none() {
                return Err(LabError::NoSuchDevice(name.clone()));
            }
        }
    }
    let alive = planner.alive();
    let summary = operations.summary().clone();
    let status = status(&summary, &planner);
    let mut rows = Vec::with_capacity(runners.len());
    for (mode, runner) in options.modes.iter().zip(&mut runners) {
        let metered = runner.metered.finish(&alive);
        let hostile = runner.hostile.as_mut().map(|judge| judge.finish(&alive));
        let components = runner
            .meter
            .as_ref()
            .map(|meter| meter.finish())
            .unwrap_or_default();
        let status = match (&metered.first_refusal, metered.refused_maps) {
            (Some(first), count) if count > 0 => format!("{count} maps refused: {first}"),
            _ => status.clone(),
        };
        rows.push(Row::new(&Parts {
            trace: name,
            mode,
            metered: &metered,
            hostile: hostile.as_ref(),
            components,
            c_none: options.profile.c_none,
            invalidation_cycles: options.profile.invalidation_cycles,
            status,
        }));
    }
    Ok(Comparison {
        rows,
        devices: operations
            .devices()
            .iter()
            .map(|(_, device)| device.name.clone())
            .collect(),
        summary,
        lines,
        bursts: planner.bursts,
        bursts_cut_by_map: planner.bursts_cut_by_map,
    })
}

/// `ok`, or why a trace's rows cannot be taken at their word. Devices that are not replayed spoil nothing.
fn status(summary: &Summary, planner: &Planner) -> String {
    if summary.lost > 0 {
        return format!("the kernel lost {} events", summary.lost);
    }
    let mut skipping = summary.skipping_devices();
    if skipping.any(|device| planner.keeps(device)) {
        return "the driver skips unmaps: the trace does not say when mappings end".into();
    }
    "ok".into()
}
