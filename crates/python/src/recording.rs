//! Records a trace on this host, as `ringfence trace record` does.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;
use ringfence_trace::{Recording, RecordingSummary, Workload};
use tempfile::NamedTempFile;

use crate::error::Failure;
use crate::signals::{Signals, detached};
use crate::source::Source;
use crate::trace::Trace;

/// Interval at which this thread looks for signals.
const TICK: Duration = Duration::from_millis(60);

/// Level of zstd, as for the command.
const LEVEL: i32 = 6;

/// Largest buffer per CPU in MiB, and largest time in seconds.
const MAX_BUFFER_MIB: u32 = 65_536;
const MAX_SECONDS: f64 = 1e6;

/// Records the DMA mappings of this host into a file that only the user may read; it is compressed
/// if its name ends in .zst. Needs root and Linux 6.12 or later. Ctrl-C ends the recording, keeps
/// the file and raises `KeyboardInterrupt`.
#[pyfunction]
#[pyo3(
    signature = (
        path, *, seconds=None, command=None, buffer_mib=64,
        tracefs=PathBuf::from("/sys/kernel/tracing")
    ),
    text_signature = "(path, *, seconds=None, command=None, buffer_mib=64, \
        tracefs='/sys/kernel/tracing')"
)]
pub(crate) fn record(
    py: Python<'_>,
    path: PathBuf,
    seconds: Option<f64>,
    command: Option<Vec<OsString>>,
    buffer_mib: u32,
    tracefs: PathBuf,
) -> PyResult<Trace> {
    let command = command.filter(|words| !words.is_empty());
    let invalid = |message: &str| Failure::Value(message.to_owned());
    if seconds.is_some() == command.is_some() {
        return Err(invalid("give seconds or command").into());
    }
    if seconds.is_some_and(|seconds| !(0.0..=MAX_SECONDS).contains(&seconds)) {
        return Err(invalid("seconds is from 0 to 1000000").into());
    }
    if !(1..=MAX_BUFFER_MIB).contains(&buffer_mib) {
        return Err(invalid("buffer_mib is from 1 to 65536").into());
    }
    let recording = Recording {
        tracefs,
        buffer_kib: buffer_mib * 1024,
        ..Recording::default()
    };
    detached(py, |signals| {
        let io = |source| Failure::Io {
            path: path.display().to_string(),
            source,
        };
        // The file is private until its rename, and only a complete one has the name.
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        let mut part = NamedTempFile::new_in(parent.unwrap_or(Path::new("."))).map_err(io)?;
        let run = |out: &mut (dyn Write + Send)| {
            let mut program;
            let workload = match (seconds, &command) {
                (Some(seconds), _) => Workload::Time(Duration::from_secs_f64(seconds)),
                (None, command) => {
                    let words = command.as_deref().unwrap_or_default();
                    program = Command::new(words.first().map_or(OsStr::new(""), |word| word));
                    program.args(words.iter().skip(1));
                    Workload::Command(&mut program)
                }
            };
            until_signal(&recording, workload, signals, out)
        };
        let compressed = path.extension() == Some(OsStr::new("zst"));
        let recorded = if compressed {
            let mut encoder = zstd::Encoder::new(&mut part, LEVEL).map_err(io)?;
            let recorded = run(&mut encoder)?;
            encoder.finish().map_err(io)?;
            recorded
        } else {
            let mut writer = BufWriter::new(&mut part);
            let recorded = run(&mut writer)?;
            writer.flush().map_err(io)?;
            recorded
        };
        part.persist(&path).map_err(|error| io(error.error))?;
        match recorded.status {
            Some(status) if !status.success() => Err(Failure::Workload(status)),
            _ => Ok(()),
        }
    })?;
    let source = Source::of_file(path);
    Ok(Trace { source })
}

/// Records on another thread. This one looks for signals, which end the recording early.
fn until_signal(
    recording: &Recording,
    workload: Workload<'_>,
    signals: &Signals,
    mut out: &mut (dyn Write + Send),
) -> Result<RecordingSummary, Failure> {
    let stop = AtomicBool::new(false);
    let caller = thread::current();
    thread::scope(|scope| {
        let recorder = scope.spawn(|| {
            let recorded = recording.run(workload, &stop, &mut out);
            caller.unpark();
            recorded
        });
        while !recorder.is_finished() {
            thread::park_timeout(TICK);
            if signals.check() {
                stop.store(true, Ordering::Relaxed);
            }
        }
        match recorder.join() {
            Ok(recorded) => Ok(recorded?),
            Err(_) => Err(Failure::Io {
                path: recording.tracefs.display().to_string(),
                source: io::Error::other("the recording panicked"),
            }),
        }
    })
}
