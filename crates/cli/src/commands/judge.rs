//! `ringfence trace judge`: reallocated pages that a device could reach.

use std::io::{Seek, Write};
use std::path::Path;
use std::time::Duration;

use ringfence_report::page_judgement;
use ringfence_trace::{
    Judgement, Operations, PageRecording, Recording, TraceOptions, TraceSource, Workload,
};
use serde::Serialize;

use super::json;
use super::trace::{options, refuse_parquet, report, stop_on_interrupt, warn_of_stale_instances};
use crate::args::JudgeArgs;
use crate::failure::Failure;
use crate::inputs::Input;
use crate::out_file::{FileAccess, OutFile};
use crate::output::{print_status, print_unless_closed, table_style};

/// Lines that may lie between the lines of one call. Page events are among them.
const LOOK_AHEAD: usize = 64 * 1024;

/// Entry of one trace in the JSON array.
#[derive(Serialize)]
struct NamedJudgement {
    trace: String,
    found: bool,
    complete: bool,
    #[serde(flatten)]
    judgement: Judgement,
}

/// Judges the traces, or a recording of this host, and prints the reports.
pub(super) fn judge(args: &JudgeArgs) -> Result<(), Failure> {
    let all = match args.record {
        Some(seconds) => vec![("recording".to_owned(), record(args, seconds)?)],
        None => {
            let inputs = Input::all(&args.traces)?;
            let names = Input::names(&inputs);
            let mut all = Vec::with_capacity(inputs.len());
            for (input, name) in inputs.iter().zip(names) {
                let mut operations = input.operations(reading(args))?;
                all.push((name, Judgement::read(&mut operations, &args.options())?));
            }
            all
        }
    };
    let found = all.iter().any(|(_, judgement)| judgement.found());
    let text = if args.json {
        let all = all.into_iter().map(|(trace, judgement)| NamedJudgement {
            trace,
            found: judgement.found(),
            complete: judgement.is_complete(),
            judgement,
        });
        json(&all.collect::<Vec<_>>())
    } else {
        let look = table_style();
        let texts = all
            .iter()
            .map(|(name, judgement)| page_judgement(name, judgement, look));
        texts.collect::<Vec<_>>().join("\n")
    };
    print_unless_closed(&text)?;
    match found {
        true => Err(Failure::PagesReached),
        false => Ok(()),
    }
}

fn reading(args: &JudgeArgs) -> TraceOptions {
    let mut options = options(args.lenient, &args.limits).with_page_events();
    options.look_ahead = LOOK_AHEAD;
    options
}

/// Records this host and judges the recording, which a temporary file without a name holds unless
/// the user keeps it.
fn record(args: &JudgeArgs, seconds: Duration) -> Result<Judgement, Failure> {
    warn_of_stale_instances(&args.recording.tracefs);
    let recording = Recording {
        tracefs: args.recording.tracefs.clone(),
        buffer_kib: args.recording.buffer * 1024,
        pages: Some(PageRecording::default()),
        ..Recording::default()
    };
    let mut operations = match &args.keep {
        Some(path) => {
            refuse_parquet(path)?;
            let mut out = OutFile::create(path, FileAccess::User)?;
            run(&recording, seconds, &mut out, path)?;
            out.finish()?;
            Operations::open(path, reading(args))?
        }
        None => {
            let failed = "store the recording in a temporary file";
            let mut file = tempfile::tempfile().map_err(Failure::system(failed))?;
            run(
                &recording,
                seconds,
                &mut file,
                Path::new("a temporary file"),
            )?;
            file.rewind().map_err(Failure::system(failed))?;
            let source = TraceSource::from_reader("recording", file)?;
            Operations::from_source("recording", source, reading(args))
        }
    };
    Ok(Judgement::read(&mut operations, &args.options())?)
}

fn run(
    recording: &Recording,
    seconds: Duration,
    out: &mut impl Write,
    path: &Path,
) -> Result<(), Failure> {
    let stop = stop_on_interrupt()?;
    print_status(&format!("recording for {} s", seconds.as_secs_f64()));
    let recorded = recording
        .run(Workload::Time(seconds), &stop, out)
        .map_err(Failure::Record)?;
    report(&recorded, path, recording.buffer_kib / 1024);
    Ok(())
}
