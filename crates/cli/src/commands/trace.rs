//! `ringfence trace`: analyses, records, anonymises and converts traces.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringfence_lab::agreement::{self, Agreement, AgreementOptions, FreeTime, TraceBegin, Verdict};
use ringfence_report::{NamedInfo, trace_agreement, trace_info};
use ringfence_trace::{
    Anonymise, AnonymiseError, ConvertError, Info, PageRecording, Recording, RecordingSummary,
    TraceOptions, Workload, stale_instances, write_parquet,
};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;

use super::json;
use super::judge::judge;
use crate::args::{
    AnonymiseArgs, ConvertArgs, InfoArgs, MAX_BUFFER_MIB, RecordArgs, TraceCommand, TraceLimitArgs,
    VerifyArgs,
};
use crate::failure::Failure;
use crate::inputs::Input;
use crate::interrupt::{AfterSignal, on_interrupt};
use crate::out_file::{FileAccess, OutFile};
use crate::output::{print, print_status, print_unless_closed, table_style};

/// Runs a `trace` subcommand.
pub(crate) fn trace(command: TraceCommand) -> Result<(), Failure> {
    match command {
        TraceCommand::Info(args) => info(&args),
        TraceCommand::Record(args) => record(&args),
        TraceCommand::Anonymise(args) => anonymise(&args),
        TraceCommand::Convert(args) => convert(&args),
        TraceCommand::Verify(args) => verify(&args),
        TraceCommand::Judge(args) => judge(&args),
    }
}

pub(super) fn options(lenient: bool, limits: &TraceLimitArgs) -> TraceOptions {
    let mut options = TraceOptions::default();
    options.lenient = lenient;
    options.limits = limits.limits();
    options
}

fn info(args: &InfoArgs) -> Result<(), Failure> {
    let inputs = Input::all(&args.traces)?;
    let mut all = Vec::with_capacity(inputs.len());
    for (input, trace) in inputs.iter().zip(Input::names(&inputs)) {
        let mut operations = input.operations(options(args.lenient, &args.limits))?;
        let info = Info::read(&mut operations)?;
        all.push(NamedInfo { trace, info });
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
    warn_of_stale_instances(&args.recording.tracefs);
    let recording = Recording {
        tracefs: args.recording.tracefs.clone(),
        buffer_kib: args.recording.buffer * 1024,
        pages: args.pages.then(PageRecording::default),
        ..Recording::default()
    };
    // A recording contains physical addresses and IOVAs, so only the user may read it.
    let mut out = OutFile::create(&args.output, FileAccess::User)?;
    // Opening a FIFO blocks until it has a reader, so the handler is installed after the open.
    // Until then, Ctrl-C ends the command.
    let stop = stop_on_interrupt()?;
    let mut command;
    let workload = match (args.seconds, workload_command(args)) {
        (Some(seconds), _) => Workload::Time(seconds),
        (None, Some(given)) => {
            command = given;
            Workload::Command(&mut command)
        }
        // The parser requires one of the two.
        (None, None) => return Err(Failure::NoWorkload),
    };
    let recorded = recording
        .run(workload, &stop, &mut out)
        .map_err(Failure::Record)?;
    out.finish()?;
    report(&recorded, &args.output, args.recording.buffer);
    match recorded.status {
        Some(status) if !status.success() => Err(Failure::Workload(status)),
        _ => Ok(()),
    }
}

/// Returns a flag that Ctrl-C sets. Without the handler, Ctrl-C would leave the tracefs instance
/// behind; with it, the recorded text is kept.
pub(super) fn stop_on_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let handled = on_interrupt(move || {
        flag.store(true, Ordering::Relaxed);
        AfterSignal::GoOn
    });
    handled.map_err(Failure::system("handle Ctrl-C"))?;
    Ok(stop)
}

pub(super) fn warn_of_stale_instances(tracefs: &Path) {
    for path in stale_instances(tracefs) {
        let path = path.display();
        print_status(&format!(
            "{path} was left by a recording that was killed, and takes memory; remove it: echo 0 \
             >{path}/events/enable; rmdir {path}"
        ));
    }
}

/// Returns the command to run during the recording. It prints to standard error if the recording
/// goes to standard output.
fn workload_command(args: &RecordArgs) -> Option<Command> {
    let (program, rest) = args.command.split_first()?;
    let mut command = Command::new(program);
    command.args(rest);
    if args.output == OsStr::new("-") {
        command.stdout(Stdio::from(io::stderr()));
    }
    Some(command)
}

pub(super) fn report(recorded: &RecordingSummary, output: &Path, buffer: u32) {
    print_status(&format!(
        "{} bytes of text to {}{}",
        recorded.bytes,
        output.display(),
        if recorded.iommu_events {
            ""
        } else {
            "; this kernel has no iommu:* events"
        }
    ));
    if recorded.lost > 0 {
        let advice = match buffer.saturating_mul(4).min(MAX_BUFFER_MIB) {
            larger if larger > buffer => format!("record again with --buffer {larger}"),
            _ => "record for a shorter time".to_owned(),
        };
        print_status(&format!(
            "{} events did not fit and are lost; {advice}",
            recorded.lost
        ));
    }
}

/// Returns 64 bits that nobody can predict.
fn random_seed() -> Result<u64, Failure> {
    let mut bytes = [0; 8];
    // A read of up to 256 bytes is whole (getrandom(2)).
    getrandom(&mut bytes, GetRandomFlags::empty())
        .map_err(Failure::system("get random numbers from the system"))?;
    Ok(u64::from_ne_bytes(bytes))
}

fn anonymise(args: &AnonymiseArgs) -> Result<(), Failure> {
    let input = Input::of(&args.trace);
    if input == Input::Stdin || is_consumed_by_reading(&args.trace) {
        return Err(Failure::ReadTwice(args.trace.clone()));
    }
    let anonymise = Anonymise {
        // The seed must be unpredictable: whoever knows it can reverse the layout.
        seed: args.seed.map_or_else(random_seed, Ok)?,
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
        AnonymiseError::Write(error) => Failure::write(&args.output)(error),
    })?;
    out.finish()
}

/// Refuses an output name that ends in .parquet, because readers expect Parquet there.
pub(super) fn refuse_parquet(output: &Path) -> Result<(), Failure> {
    if output.extension() != Some(OsStr::new("parquet")) {
        return Ok(());
    }
    Err(Failure::Form {
        path: output.to_owned(),
        advice: "this command writes text; `ringfence trace convert` makes Parquet of it",
    })
}

/// Returns true if the output will be a regular file, new or replaced, whose name does not end in
/// .parquet.
fn lacks_parquet_extension(output: &Path) -> bool {
    let is_other = fs::metadata(output).is_ok_and(|about| !about.is_file());
    !is_other && output != OsStr::new("-") && output.extension() != Some(OsStr::new("parquet"))
}

/// Returns true for a FIFO, a socket or a device: the next open does not return the same bytes.
fn is_consumed_by_reading(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|about| !about.is_file() && !about.is_dir())
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

/// Entry of `trace verify --json`.
#[derive(Serialize)]
struct Verified {
    trace: String,
    model: &'static str,
    #[serde(flatten)]
    agreement: Agreement,
}

fn verify(args: &VerifyArgs) -> Result<(), Failure> {
    let inputs = [Input::of(&args.trace)];
    let [input] = &inputs;
    let reading = options(args.lenient, &args.limits).with_addresses();
    let mut operations = input.operations(reading)?;
    let options = AgreementOptions {
        begin: match args.from_boot {
            true => TraceBegin::BeforeMappings,
            false => TraceBegin::Unknown,
        },
        free_time: match args.lazy {
            true => FreeTime::AtFlush,
            false => FreeTime::AtUnmap,
        },
        reserved: args.reserved.clone(),
        limits: args.device_limits.limits(),
    };
    let agreement = agreement::verify(&mut operations, options)?;
    let trace = Input::names(&inputs).concat();
    let verdict = agreement.verdict;
    let model = if args.lazy {
        "linux-lazy"
    } else {
        "linux-strict"
    };
    let text = match args.json {
        false => trace_agreement(&trace, model, &agreement, table_style()),
        true => json(&Verified {
            trace,
            model,
            agreement,
        }),
    };
    print_unless_closed(&text)?;
    match verdict {
        Verdict::Differs if args.from_boot => Err(Failure::Disagreement),
        Verdict::Inconclusive(reason) if args.from_boot => Err(Failure::Inconclusive(reason)),
        _ => Ok(()),
    }
}

fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    if lacks_parquet_extension(&args.output) {
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
        ConvertError::Write(error) => Failure::write(&args.output)(error),
        other => Failure::io(&args.output)(io::Error::other(other)),
    })?;
    out.finish()?;
    print_status(&format!(
        "{} operations and {} marks to {}",
        written.operations,
        written.marks,
        args.output.display()
    ));
    Ok(())
}
