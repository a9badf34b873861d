//! The replay of one task.

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use ringfence_lab::LabError;
use ringfence_lab::compare::{CompareOptions, compare};
use ringfence_lab::mapping_cache::{CycleParams, Cycles};
use ringfence_lab::ring::{RingSizes, count_ring_usage};
use ringfence_lab::row::Row;
use ringfence_lab::{Operation, ReplayLimits};
use ringfence_trace::{Operations, TraceSource};

use crate::error::Problem;
use crate::mode;
use crate::task::Task;
use crate::traces::Trace;

/// The outcome of a task. A task that fails is a row too.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The row, or the text of the error.
    pub result: Result<Box<Row>, String>,
    /// Duration of the task on this machine, in seconds.
    pub seconds: f64,
}

/// The reason why a task has no row.
#[derive(Debug, thiserror::Error)]
enum TaskError {
    #[error("the trace cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("the trace is not the one of the plan: its digest is {found}")]
    OtherTrace { found: String },
    #[error(transparent)]
    Mode(#[from] Problem),
    #[error(transparent)]
    Lab(#[from] LabError),
    #[error(transparent)]
    Profile(#[from] ringfence_lab::ProfileError),
    #[error("the number of cycles is 0")]
    NoCycles,
    #[error("defect in ringfence: the replay has no row")]
    NoRow,
}

/// Number k of parallel page walkers of `parallel_ceiling_gbps`, the default of `compare`.
const WALKERS: u32 = 4;

/// Runs a task on this thread. Reads the trace as a stream: memory grows with its live mappings and
/// not with its length.
pub fn run(task: &Task) -> Outcome {
    let start = Instant::now();
    // A defect in one replay of thousands must not end the others.
    let result = match catch_unwind(AssertUnwindSafe(|| replay(task))) {
        Ok(result) => result.map(Box::new).map_err(|error| text(&error)),
        Err(_) => Err("defect in ringfence: the replay panicked".to_owned()),
    };
    Outcome {
        result,
        seconds: start.elapsed().as_secs_f64(),
    }
}

/// Returns the error with its causes.
fn text(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.ends_with(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
        source = error.source();
    }
    text
}

fn replay(task: &Task) -> Result<Row, TaskError> {
    let content = &task.content;
    let trace = Trace {
        path: task.path.clone(),
    };
    let found = trace.digest()?;
    if found != content.digest {
        return Err(TaskError::OtherTrace { found });
    }
    content.profile.validate()?;
    let mode = mode::find(&content.mode)?;
    let devices = content.device.clone().map(|device| vec![device]);
    let limits = ReplayLimits::default();
    let rings = match content.ring_entries {
        Some(slots) => RingSizes::Every(slots),
        None if mode.has_rings() => {
            count_ring_usage(open(&trace)?, devices.as_deref(), limits)?.sizes()
        }
        None => RingSizes::default(),
    };
    let cache_cycles = match content.cache_cycles {
        None => CycleParams::PAPER,
        Some(cycles) => CycleParams {
            cycle_ns: cycles.period_ns,
            cycles: Cycles::new(cycles.kept).ok_or(TaskError::NoCycles)?,
        },
    };
    let options = CompareOptions {
        modes: vec![mode],
        profile: content.profile.for_replay(),
        prices: Some(content.profile.prices(Operation::Packet, WALKERS)),
        devices,
        repetitions: content.repetitions,
        attack: content.attack,
        rings,
        cache_cycles,
        limits,
        ..CompareOptions::new()
    };
    let comparison = compare(&task.trace, open(&trace)?, &options, |_| {})?;
    comparison.rows.into_iter().next().ok_or(TaskError::NoRow)
}

fn open(trace: &Trace) -> Result<Operations<TraceSource>, LabError> {
    Ok(trace.operations()?)
}
