//! `ringfence trace`: analyses, records, anonymises and converts traces.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringfence_report::trace_info;
use ringfence_trace::{
    Anonymise, AnonymiseError, ConvertError, Info, Recording, TraceOptions, Workload,
    stale_instances, write_parquet,
};
use serde::Serialize;

use super::json;
use crate::args::{AnonymiseArgs, ConvertArgs, InfoArgs, RecordArgs, TraceCommand, TraceLimitArgs};
use crate::failure::Failure;
use crate::inputs::Input;
use crate::interrupt::{AfterSignal, on_interrupt};
use crate::out_file::{FileAccess, OutFile};
use crate::output::{print, print_line, table_style};

/// Runs a `trace` subcommand.
pub(crate) fn trace(command: TraceCommand) -> Result<(), Failure> {
    match command {
        TraceCommand::Info(args) => info(&args),
        TraceCommand::Record(args) => record(&args),
        TraceCommand::Anonymise(args) => anonymise(&args),
        TraceCommand::Convert(args) => convert(&args),
    }
}

/// Entry of one trace in the JSON array.
#[derive(Serialize)]
struct Named {
    trace: String,
    #[serde(flatten)]
    info: Info,
}

fn options(lenient: bool, limits: &TraceLimitArgs) -> TraceOptions {
    let mut options = TraceOptions::default();
    options.lenient = lenient;
    options.limits = limits.limits();
    options
}

fn info(args: &InfoArgs) -> Result<(), Failure> {
    let inputs = Input::all(&args.traces);
    let mut all = Vec::with_capacity(inputs.len());
    for (input, trace) in inputs.iter().zip(Input::names(&inputs)) {
        let mut operations = input.operations(options(args.lenient, &args.limits))?;
        let info = Info::read(&mut operations)?;
        all.push(Named { trace, info });
    }
    if args.json {
        return print(&json(&all));
    }
    let look = table_style();
    let texts: Vec<String> = all
        .iter()
        .map(|one| trace_info(&one.trace, &one.info, look))
        .collect();
    print(&texts.join("\n"))
}

fn record(args: &RecordArgs) -> Result<(), Failure> {
    refuse_parquet(&args.output)?;
    for path in stale_instances(&args.tracefs) {
        let path = path.display();
        print_line(&format!(
            "{path} was left by a recording that was killed, and takes memory; remove it: echo 0 \
             >{path}/events/enable; rmdir {path}"
        ));
    }

    let recording = Recording {
        tracefs: args.tracefs.clone(),
        buffer_kib: args.buffer * 1024,
        ..Recording::default()
    };
    // A recording contains kernel addresses, so only the user may read it.
    let mut out = OutFile::create(&args.output, FileAccess::User)?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    // Without the handler, Ctrl-C would leave the tracefs instance behind; with it, the recorded
    // text is kept. Opening a FIFO blocks until it has a reader, so the handler is installed after
    // the open. Until then, Ctrl-C ends the command.
    let handled = on_interrupt(move || {
        flag.store(true, Ordering::Relaxed);
        AfterSignal::GoOn
    });
    handled.map_err(Failure::io("Ctrl-C".as_ref()))?;
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
    print_line(&format!(
        "{} bytes of text to {}{}",
        recorded.bytes,
        args.output.display(),
        if recorded.iommu_events {
            ""
        } else {
            "; this kernel has no iommu:* events"
        }
    ));
    if recorded.lost > 0 {
        print_line(&format!(
            "{} events did not fit and are lost; record again with --buffer {}",
            recorded.lost,
            args.buffer.saturating_mul(4)
        ));
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
        // Random seed of the standard library; it differs between processes.
        seed: args
            .seed
            .unwrap_or_else(|| RandomState::new().hash_one(0u8)),
        from_zero: !args.keep_times,
    };
    refuse_parquet(&args.output)?;
    refuse_same(&args.trace, &args.output)?;
    let name = args.trace.display().to_string();
    let mut out = OutFile::create(&args.output, FileAccess::Umask)?;
    let (first, second) = (input.source()?, input.source()?);
    let done = anonymise.run(
        &name,
        first,
        second,
        &options(args.lenient, &args.limits),
        &mut out,
    );
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

/// Refuses an output name that ends in .parquet, because readers expect Parquet there.
fn refuse_parquet(output: &Path) -> Result<(), Failure> {
    if output.extension() != Some(OsStr::new("parquet")) {
        return Ok(());
    }
    Err(Failure::Form {
        path: output.to_owned(),
        advice: "this command writes text; `ringfence trace convert` makes Parquet of it",
    })
}

/// Returns true if the output is a regular file whose name does not end in .parquet.
fn named_otherwise(output: &Path) -> bool {
    let is_other = fs::metadata(output).is_ok_and(|about| !about.is_file());
    !is_other && output != OsStr::new("-") && output.extension() != Some(OsStr::new("parquet"))
}

/// Refuses an output that is also the input: it would replace the recording.
fn refuse_same(input: &Path, output: &Path) -> Result<(), Failure> {
    let input = match input == OsStr::new("-") {
        true => Path::new("/proc/self/fd/0"),
        false => input,
    };
    let file = |path| fs::metadata(path).ok().filter(Metadata::is_file);
    let Some((read, written)) = file(input).zip(file(output)) else {
        return Ok(());
    };
    if (read.dev(), read.ino()) == (written.dev(), written.ino()) {
        return Err(Failure::SameFile(output.to_owned()));
    }
    Ok(())
}

fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    if named_otherwise(&args.output) {
        return Err(Failure::Form {
            path: args.output.clone(),
            advice: "trace convert writes Parquet; name a file that ends in .parquet",
        });
    }
    refuse_same(&args.trace, &args.output)?;
    // Create the output before the trace is opened, so that an invalid output (a directory, say)
    // fails before any work.
    let mut out = OutFile::create(&args.output, FileAccess::Umask)?;
    let mut operations = Input::of(&args.trace).operations(options(args.lenient, &args.limits))?;
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
    print_line(&format!(
        "{} operations and {} marks to {}",
        written.operations,
        written.marks,
        args.output.display()
    ));
    Ok(())
}
