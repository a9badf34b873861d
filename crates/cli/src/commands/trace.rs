//! `ringfence trace`.

use std::ffi::OsStr;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringfence_report::trace_info;
use ringfence_trace::{Anonymise, AnonymiseError, Info, Options, Recording, Workload};
use serde::Serialize;

use super::json;
use crate::args::{AnonymiseArgs, ConvertArgs, InfoArgs, RecordArgs, TraceCommand};
use crate::failure::Failure;
use crate::inputs::Input;
use crate::out_file::OutFile;
use crate::output::{look, print};

/// Does what is asked with traces.
pub(crate) fn trace(command: TraceCommand) -> Result<(), Failure> {
    match command {
        TraceCommand::Info(args) => info(&args),
        TraceCommand::Record(args) => record(&args),
        TraceCommand::Anonymise(args) => anonymise(&args),
        TraceCommand::Convert(args) => convert(&args),
    }
}

/// A trace's object in the JSON array.
#[derive(Serialize)]
struct Named {
    trace: String,
    #[serde(flatten)]
    info: Info,
}

fn options(lenient: bool) -> Options {
    let mut options = Options::default();
    options.lenient = lenient;
    options
}

fn info(args: &InfoArgs) -> Result<(), Failure> {
    let inputs = Input::all(&args.traces);
    let mut all = Vec::with_capacity(inputs.len());
    for (input, trace) in inputs.iter().zip(Input::names(&inputs)) {
        let mut operations = input.operations(options(args.lenient))?;
        let info = Info::read(&mut operations)?;
        all.push(Named { trace, info });
    }
    if args.json {
        return print(&json(&all));
    }
    let look = look();
    let texts: Vec<String> = all
        .iter()
        .map(|one| trace_info(&one.trace, &one.info, look))
        .collect();
    print(&texts.join("\n"))
}

fn record(args: &RecordArgs) -> Result<(), Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    // Without the handler Ctrl-C would leave the instance behind; with it, what was recorded is kept.
    let handled = ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed));
    handled.map_err(|e| Failure::io("Ctrl-C".as_ref())(io::Error::other(e)))?;

    let recording = Recording {
        tracefs: args.tracefs.clone(),
        buffer_kib: args.buffer * 1024,
        ..Recording::default()
    };
    let mut out = OutFile::create(&args.output)?;
    let mut command;
    let workload = match (args.seconds, args.command.split_first()) {
        (Some(seconds), _) => Workload::Time(seconds),
        (None, Some((program, rest))) => {
            command = Command::new(program);
            command.args(rest);
            if args.output == OsStr::new("-") {
                command.stdout(Stdio::from(io::stderr()));
            }
            Workload::Command(&mut command)
        }
        // The parser requires one of the two.
        (None, None) => Workload::Time(std::time::Duration::ZERO),
    };
    let recorded = recording
        .run(workload, &stop, &mut out)
        .map_err(Failure::Record)?;
    out.finish()?;
    eprintln!(
        "ringfence: {} bytes of text to {}{}",
        recorded.bytes,
        args.output.display(),
        if recorded.iommu_events {
            ""
        } else {
            "; this kernel has no iommu:* events"
        }
    );
    if recorded.lost > 0 {
        eprintln!(
            "ringfence: {} events did not fit and are lost; record again with --buffer {}",
            recorded.lost,
            args.buffer.saturating_mul(4)
        );
    }
    match recorded.status {
        Some(status) if !status.success() => Err(Failure::Workload(status)),
        _ => Ok(()),
    }
}

fn anonymise(args: &AnonymiseArgs) -> Result<(), Failure> {
    let input = Input::of(&args.trace);
    if input == Input::Stdin {
        return Err(Failure::ReadTwice);
    }
    let anonymise = Anonymise {
        // The standard library's source of randomness: two processes do not draw the same.
        seed: args
            .seed
            .unwrap_or_else(|| RandomState::new().hash_one(0u8)),
        from_zero: !args.keep_times,
    };
    let name = args.trace.display().to_string();
    let mut out = OutFile::create(&args.output)?;
    let (first, second) = (input.source()?, input.source()?);
    let done = anonymise.run(&name, first, second, &options(args.lenient), &mut out);
    done.map_err(|error| match error {
        AnonymiseError::Trace(error) => Failure::Trace(error),
        AnonymiseError::Write(e) if e.kind() == io::ErrorKind::BrokenPipe => Failure::Closed,
        AnonymiseError::Write(source) => Failure::Io {
            path: args.output.clone(),
            source,
        },
    })?;
    out.finish()
}

#[cfg(feature = "parquet")]
fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    use ringfence_trace::{ConvertError, write_parquet};

    let mut operations = Input::of(&args.trace).operations(options(args.lenient))?;
    let mut out = OutFile::create(&args.output)?;
    let written = write_parquet(&mut operations, &mut out).map_err(|error| match error {
        ConvertError::Trace(error) => Failure::Trace(error),
        ConvertError::Write(e) if e.kind() == io::ErrorKind::BrokenPipe => Failure::Closed,
        ConvertError::Write(source) => Failure::Io {
            path: args.output.clone(),
            source,
        },
        other => Failure::Io {
            path: args.output.clone(),
            source: io::Error::other(other),
        },
    })?;
    out.finish()?;
    eprintln!(
        "ringfence: {} operations and {} marks to {}",
        written.operations,
        written.marks,
        args.output.display()
    );
    Ok(())
}

#[cfg(not(feature = "parquet"))]
fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    Err(Failure::Trace(ringfence_trace::TraceError::Parquet {
        file: args.output.display().to_string(),
        problem: ringfence_trace::ParquetProblem::NotBuilt,
    }))
}
