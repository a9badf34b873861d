//! Any bytes as the file of a trace, through the code of `trace info`, `size` and `compare`.
//!
//! Byte 0 of the input, modulo 4, selects how the rest becomes a file: unmodified (0, 3),
//! compressed by zstd (1), or, if it is a valid text, converted to Parquet (2). Byte 1, modulo 8,
//! selects the command: `trace info` (0), `size` (1), or `compare` in one of [`MODES`].
//!
//! For any file, memory and steps stay within the limits for its size. The limits are small, so
//! that an input takes milliseconds.

use std::fs;

use ringfence_lab::compare::{self, compare};
use ringfence_lab::mapping_cache::CycleParams;
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Planner, each_plan};
use ringfence_lab::size::{self, advise, measure_demand};
use ringfence_lab::{LabError, Profile, ReplayLimits};
use ringfence_pviommu::rtc::Cycles;
use ringfence_trace::{
    Info, LimitExceeded, Malformed, Operations, TraceError, TraceOptions, TraceSource,
    write_parquet,
};

use crate::OutcomeHook;
use crate::parquet::open_bytes;

/// Outcomes that the corpus reaches: each completed command, each limit, and each kind of refused
/// file.
pub const OUTCOMES: &[&str] = &[
    "info",
    "size",
    "compare",
    "Text",
    "Mapping",
    "Live",
    "Mapped",
    "Segments",
    "List",
    "Rows",
    "Marks",
    "DeviceLimit",
    "CrowdedPage",
    "TooLong",
    "Malformed",
    "Archive",
    "Compression",
    "Parquet",
];

/// Modes without a table, with one invalidation per unmap, deferred, with rings, and with cycles.
const MODES: [&str; 6] = [
    "none",
    "strict",
    "linux-lazy",
    "riommu",
    "pviommu+rtc-adaptive",
    "rtc-paper",
];

/// `size` makes two passes each for rings of one size and for a metered pass, and `compare` makes
/// two.
const PASSES: u64 = 2;
/// The bound of `docs/LIMITS.md`.
const RATIO: u64 = 100;
const BASE: u64 = 64 << 20;
/// Steps of a plan per operation: two ends of bursts, a doorbell, 24 jiffies of a gap and 256 ends
/// of each of two cycles.
const STEPS: u64 = 600;

fn options() -> TraceOptions {
    let mut options = TraceOptions::default();
    let limits = &mut options.limits;
    limits.line = 2048;
    limits.text = Some(64 << 10);
    limits.mapping = 16 << 20;
    limits.live = 24 << 20;
    limits.mapped = Some(48 << 20);
    limits.segments = Some(64);
    limits.list = 16;
    limits.rows = Some(256);
    limits.marks = Some(1024);
    options
}

fn replay_limits() -> ReplayLimits {
    let mut limits = ReplayLimits::default();
    limits.devices = 8;
    limits.buffers_on_a_page = 8;
    limits
}

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let [form, command, rest @ ..] = data else {
        return;
    };
    let file = match form % 4 {
        1 => zstd::encode_all(rest, 1).expect("into memory"),
        2 => {
            let mut file = Vec::new();
            let mut options = TraceOptions::default();
            options.limits.text = Some(64 << 10);
            let mut operations = Operations::new("text", rest, options);
            match write_parquet(&mut operations, &mut file) {
                Ok(_) => file,
                Err(_) => return,
            }
        }
        _ => rest.to_vec(),
    };
    let before = resident();
    let outcome = match command % 8 {
        0 => info(&file),
        1 => sizes(&file),
        mode => compared(&file, MODES[usize::from(mode - 2)]),
    };
    if let Some(before) = before
        && let Some(peak) = peak()
    {
        let more = peak.saturating_sub(before);
        let most = PASSES * (RATIO * file.len() as u64 + BASE);
        assert!(more <= most, "{more} bytes for a file of {}", file.len());
    }
    match outcome {
        Ok(done) => {
            steps(&file);
            reached(done);
        }
        Err(error) => {
            let text = error.to_string();
            assert!(
                !text.chars().any(|char| char.is_control() && char != '\n'),
                "{text:?}"
            );
            reached(name(&error));
        }
    }
}

fn info(file: &[u8]) -> Result<&'static str, LabError> {
    let mut operations = open(file)?;
    match Info::read(&mut operations) {
        // The command needs the lines of a text.
        Err(TraceError::Parquet { .. }) if file.starts_with(b"PAR1") => Ok("info"),
        other => {
            let info = other?;
            let names = info.devices.iter().map(|device| &device.name);
            for text in names.chain(info.marks.iter().map(|mark| &mark.1)) {
                assert!(!text.contains('\u{1b}'), "{text:?}");
            }
            Ok("info")
        }
    }
}

fn sizes(file: &[u8]) -> Result<&'static str, LabError> {
    let usage = measure_demand(open(file)?, None, replay_limits(), |_| {})?;
    let options = size::SizeOptions {
        profile: Profile::r210_2015(),
        devices: None,
        entries: vec![4],
        modes: Vec::new(),
        limits: replay_limits(),
    };
    advise(
        "fuzz",
        || open(file).map_err(LabError::from),
        &usage,
        &options,
        |_| {},
    )?;
    Ok("size")
}

fn compared(file: &[u8], mode: &str) -> Result<&'static str, LabError> {
    let options = compare::CompareOptions {
        modes: Mode::find(mode).into_iter().collect(),
        repetitions: 0,
        limits: replay_limits(),
        ..compare::CompareOptions::new()
    };
    let comparison = compare("fuzz", open(file)?, &options, |_| {})?;
    assert_eq!(comparison.rows.len(), 1, "{mode}");
    Ok("compare")
}

/// Counts the steps of a replay with two cycles.
fn steps(file: &[u8]) {
    let fine = CycleParams {
        cycle_ns: 156_862_745,
        cycles: Cycles::new(Cycles::MAX).expect("the highest"),
    };
    let mut planner = Planner::new().with_cycles([fine, CycleParams::PAPER]);
    let (mut steps, mut operations) = (0, 0);
    let done = open(file).map_err(LabError::from).and_then(|trace| {
        let mut trace = trace;
        each_plan(&mut trace, &mut planner, None, |_, plan, _| {
            steps += plan.steps.len() as u64;
            operations += plan.maps + plan.unmaps;
            Ok(())
        })
    });
    if done.is_ok() {
        assert!(steps <= STEPS * (operations + 1), "{steps} of {operations}");
    }
}

/// Opens the input. A recording would start an external program for each input, so it is read as an
/// empty file.
fn open(bytes: &[u8]) -> Result<Operations<TraceSource>, TraceError> {
    let recording = bytes.starts_with(b"\x17\x08\x44tracing");
    open_bytes(if recording { b"" } else { bytes }, options())
}

/// Returns the resident memory and resets the peak to it; `None` if the system does not report it.
fn resident() -> Option<u64> {
    fs::write("/proc/self/clear_refs", "5").ok()?;
    status("VmRSS:")
}

fn peak() -> Option<u64> {
    status("VmHWM:")
}

fn status(key: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// A limit added later has no name here, which the corpus test reports.
fn name(error: &LabError) -> &'static str {
    use ringfence_trace::ParquetProblem::Limit;
    let excess = match error {
        LabError::DeviceLimit { .. } => return "DeviceLimit",
        LabError::CrowdedPage { .. } => return "CrowdedPage",
        LabError::Trace(TraceError::Limit { excess, .. }) => excess,
        LabError::Trace(TraceError::Parquet {
            problem: Limit { excess, .. },
            ..
        }) => excess,
        LabError::Trace(TraceError::Parquet { .. }) => return "Parquet",
        LabError::Trace(TraceError::Archive { .. }) => return "Archive",
        LabError::Trace(TraceError::Compression { .. }) => return "Compression",
        LabError::Trace(TraceError::Malformed {
            reason: Malformed::TooLong { .. },
            ..
        }) => return "TooLong",
        LabError::Trace(_) => return "Malformed",
        other => panic!("{other}"),
    };
    match excess {
        LimitExceeded::Text { .. } => "Text",
        LimitExceeded::Mapping { .. } => "Mapping",
        LimitExceeded::Live { .. } => "Live",
        LimitExceeded::Mapped { .. } => "Mapped",
        LimitExceeded::Segments { .. } => "Segments",
        LimitExceeded::List { .. } => "List",
        LimitExceeded::Rows { .. } => "Rows",
        LimitExceeded::Marks { .. } => "Marks",
        _ => "unknown limit",
    }
}
