//! `ringfence reproduce`: runs the papers' experiments and compares their published numbers.

mod echo_peer;
mod guest_counters;
mod guest_runner;
mod guest_session;
mod guests;
mod interrupt;
mod load_counters;
mod load_runner;
mod loads;

use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use ringfence_experiments::{Experiment, Setting, prefetch, reuse};
use ringfence_report::{
    MeasuredOn, Reproduction, TableStyle, experiments_table, finding_markdown, finding_terminal,
    findings_page, findings_terminal,
};

use ringfence_trace::TraceOptions;

use super::json;
use crate::args::ReproduceArgs;
use crate::failure::Failure;
use crate::inputs::{Input, SPOOL_LIMIT};
use crate::out_file::write_into;
use crate::output::{print, print_status, print_unless_closed, table_style};

/// The experiments that read recorded traces (X07, X22), and those that boot guests (X21, X29).
const PREFETCHERS: &str = "X07";
const REUSE: &str = "X22";
const GUESTS: &str = "X21";
const LOADS: &str = "X29";

/// Runs experiments of the papers and prints their findings.
pub(crate) fn reproduce(args: &ReproduceArgs) -> Result<(), Failure> {
    if args.list {
        return print(&experiments_table(table_style()));
    }
    let experiments: Vec<&Experiment> = if args.all {
        Experiment::ALL.iter().collect()
    } else {
        args.ids.clone()
    };
    if let Some(dir) = &args.out {
        fs::create_dir_all(dir).map_err(Failure::io(dir))?;
    }
    let mut setting = Setting::full();
    let asked = |id| experiments.iter().any(|experiment| experiment.id == id);
    if !args.traces.is_empty() {
        let wanted = [PREFETCHERS, REUSE].map(asked);
        if wanted == [false; 2] {
            return Err(Failure::TraceUnread);
        }
        recorded(&args.traces, wanted, &mut setting)?;
    }
    let mut reproduction = Reproduction::new(MeasuredOn::this_machine(), setting.profile.clone());
    let mut interrupted = false;
    // False after the reader of standard output has closed the pipe.
    let mut is_read = true;
    for (index, experiment) in experiments.iter().enumerate() {
        progress(index, experiments.len(), experiment);
        if experiment.id == GUESTS {
            // Do not fetch anything if X21 is only one of all experiments.
            (setting.guests, interrupted) = guests::count(&args.guests, !args.all)?;
        }
        if experiment.id == LOADS {
            (setting.loads, interrupted) = loads::count(&args.guests, &args.loads, !args.all)?;
        }
        let finding = experiment.run(&setting)?;
        if !args.json && is_read {
            let text = finding_terminal(&finding, table_style());
            is_read = print_unless_closed(&format!("{text}\n"))?;
        }
        reproduction.findings.push(finding);
        // Without a reader, further findings are for the files only.
        if interrupted || !is_read && args.out.is_none() {
            break;
        }
    }
    if args.json {
        print_unless_closed(&json(&reproduction))?;
    } else if is_read {
        print_unless_closed(&findings_terminal(&reproduction, table_style()))?;
    }
    if let Some(dir) = &args.out {
        write(&reproduction, dir)?;
    }
    match setting.guests.failed() + setting.loads.failed() {
        _ if interrupted => Err(Failure::Interrupted),
        0 => Ok(()),
        failed => Err(Failure::Guests(failed)),
    }
}

/// Computes the predictions of prefetchers for the devices of recorded traces, and the reuse of
/// their pages, each if it is wanted.
fn recorded(
    paths: &[PathBuf],
    [prefetchers, reused]: [bool; 2],
    setting: &mut Setting,
) -> Result<(), Failure> {
    let inputs = Input::all(paths)?;
    let names = Input::names(&inputs);
    for (index, (input, name)) in inputs.into_iter().zip(&names).enumerate() {
        if std::io::stderr().is_terminal() {
            print_status(&format!("trace {}/{} {name}", index + 1, names.len()));
        }
        // An input for both experiments is read twice.
        let input = if prefetchers && reused {
            input.reusable(SPOOL_LIMIT)?
        } else {
            input
        };
        if prefetchers {
            let rows = prefetch::of_trace(name, input.source()?)?;
            setting.recorded.extend(rows);
        }
        if reused {
            let mut operations = input.operations(TraceOptions::default())?;
            let rows = reuse::of_trace(name, &mut operations)?;
            setting.reuse.extend(rows);
        }
    }
    Ok(())
}

/// Prints the current experiment to standard error if that is a terminal.
fn progress(index: usize, count: usize, experiment: &Experiment) {
    if std::io::stderr().is_terminal() {
        let (id, title) = (experiment.id, experiment.title);
        print_status(&format!("{}/{count} {id} {title}", index + 1));
    }
}

/// Writes the findings in every format into a directory, and prints their paths.
fn write(reproduction: &Reproduction, dir: &Path) -> Result<(), Failure> {
    let mut text = String::new();
    for finding in &reproduction.findings {
        text += &finding_terminal(finding, TableStyle::PLAIN);
        text.push('\n');
    }
    text += &findings_terminal(reproduction, TableStyle::PLAIN);
    for (name, content) in [
        ("reproduction.html", findings_page(reproduction)),
        ("reproduction.json", json(reproduction)),
        ("reproduction.txt", text),
    ] {
        let path = write_into(dir, name, content.as_bytes())?;
        print_status(&format!("wrote {}", path.display()));
    }
    for finding in &reproduction.findings {
        let name = format!("{}.md", finding.id);
        let path = write_into(dir, &name, finding_markdown(finding).as_bytes())?;
        print_status(&format!("wrote {}", path.display()));
    }
    Ok(())
}
