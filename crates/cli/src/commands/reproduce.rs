//! `ringfence reproduce`.

use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use ringfence_lab::experiments::prefetch::{PrefetchRow, of_trace};
use ringfence_lab::experiments::{Experiment, Setting};
use ringfence_lab::report::{
    Look, Reproduction, experiments_table, finding_terminal, findings_page, findings_terminal,
};

use super::compare::executed_on;
use super::json;
use crate::args::ReproduceArgs;
use crate::failure::Failure;
use crate::inputs::Input;
use crate::output::{look, print};

/// Runs experiments of the documents and prints what came of them.
pub(crate) fn reproduce(args: &ReproduceArgs) -> Result<(), Failure> {
    if args.list {
        return print(&experiments_table(look()));
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
    if !args.traces.is_empty() {
        if !experiments.iter().any(|experiment| experiment.id == "X07") {
            return Err(Failure::TraceUnread);
        }
        setting.recorded = recorded(&args.traces)?;
    }
    let mut reproduction = Reproduction::new(executed_on(), setting.profile.clone());
    for (place, experiment) in experiments.iter().enumerate() {
        progress(place, experiments.len(), experiment);
        let finding = experiment.run(&setting)?;
        if !args.json {
            print(&format!("{}\n", finding_terminal(&finding, look())))?;
        }
        reproduction.findings.push(finding);
    }
    if args.json {
        print(&json(&reproduction))?;
    } else {
        print(&findings_terminal(&reproduction, look()))?;
    }
    match &args.out {
        Some(dir) => write(&reproduction, dir),
        None => Ok(()),
    }
}

/// What prefetchers predict of the devices of recorded traces.
fn recorded(paths: &[PathBuf]) -> Result<Vec<PrefetchRow>, Failure> {
    let inputs = Input::all(paths);
    let stdin = inputs.iter().filter(|input| **input == Input::Stdin);
    if stdin.count() > 1 {
        return Err(Failure::StdinTwice);
    }
    let mut rows = Vec::new();
    let names = Input::names(&inputs);
    for (place, (input, name)) in inputs.iter().zip(&names).enumerate() {
        if std::io::stderr().is_terminal() {
            eprintln!("ringfence: trace {}/{} {name}", place + 1, inputs.len());
        }
        rows.extend(of_trace(name, input.source()?)?);
    }
    Ok(rows)
}

/// Says on standard error what runs, if anybody is there to read it.
fn progress(place: usize, count: usize, experiment: &Experiment) {
    if std::io::stderr().is_terminal() {
        let (id, title) = (experiment.id, experiment.title);
        eprintln!("ringfence: {}/{count} {id} {title}", place + 1);
    }
}

/// Writes the findings in every form into a directory, and says where.
fn write(reproduction: &Reproduction, dir: &Path) -> Result<(), Failure> {
    let mut text = String::new();
    for finding in &reproduction.findings {
        text += &finding_terminal(finding, Look::PLAIN);
        text.push('\n');
    }
    text += &findings_terminal(reproduction, Look::PLAIN);
    for (name, content) in [
        ("reproduction.html", findings_page(reproduction)),
        ("reproduction.json", json(reproduction)),
        ("reproduction.txt", text),
    ] {
        let path = dir.join(name);
        fs::write(&path, content).map_err(Failure::io(&path))?;
        eprintln!("ringfence: wrote {}", path.display());
    }
    Ok(())
}
