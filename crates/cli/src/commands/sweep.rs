//! `ringfence sweep`: runs the tasks of a plan and stores a file for each.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::thread;
use std::time::Instant;

use ringfence_sweep::{EnsureError, Ensured, Machine, PartFile, Plan, Task, ensure, read_list};
use serde::Serialize;

use super::json;
use crate::args::SweepArgs;
use crate::failure::Failure;
use crate::interrupt;
use crate::output::{print, print_status, print_unless_closed};
use crate::progress::Progress;

/// The counts of a run: the output of `--json`.
#[derive(Debug, Default, Serialize)]
struct Summary {
    /// Tasks of the plan or list, in this shard.
    tasks: usize,
    /// Tasks that this run performed, including failed ones.
    run: usize,
    /// Tasks whose intact files existed.
    present: usize,
    /// Those of `run` whose existing file was damaged.
    damaged: usize,
    /// Failed tasks, of this run and of earlier ones.
    failed: usize,
    /// The shard, as I/N.
    shard: String,
    /// Tasks that ran at once.
    jobs: usize,
    /// Digest that names this machine in the rows.
    machine: String,
    /// Duration of the run in seconds.
    seconds: f64,
}

/// Runs the tasks of a plan, or lists them.
pub(crate) fn sweep(args: &SweepArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let mut tasks = if args.plan.extension() == Some(OsStr::new("jsonl")) {
        read_list(&args.plan)?
    } else {
        Plan::load(&args.plan)?.tasks()?
    };
    if let Some(name) = &args.task {
        tasks.retain(|task| task.name == *name);
        if tasks.is_empty() {
            return Err(Failure::NoSuchTask {
                name: name.clone(),
                plan: args.plan.clone(),
            });
        }
    }
    let tasks = args.shard.of(tasks);
    let Some(dir) = &args.out else {
        return list(&tasks);
    };
    fs::create_dir_all(dir).map_err(Failure::io(dir))?;
    let mut summary = run_all(args, dir, &tasks)?;
    summary.shard = args.shard.to_string();
    summary.seconds = start.elapsed().as_secs_f64();
    if args.json {
        print_unless_closed(&json(&summary))?;
    } else {
        print_status(&format!(
            "{} tasks: {} run, {} present; {} failed; {} damaged files replaced; {:.1} s",
            summary.tasks,
            summary.run,
            summary.present,
            summary.failed,
            summary.damaged,
            summary.seconds
        ));
    }
    match summary.failed {
        0 => Ok(()),
        failed => Err(Failure::TasksFailed(failed)),
    }
}

fn list(tasks: &[Task]) -> Result<(), Failure> {
    let mut text = String::new();
    for task in tasks {
        // A task always serialises: its path is UTF-8.
        text.push_str(&serde_json::to_string(task).unwrap_or_default());
        text.push('\n');
    }
    print(&text)
}

/// The state that the threads of a run share.
struct Shared<'a> {
    next: std::slice::Iter<'a, Task>,
    summary: Summary,
    error: Option<Failure>,
    progress: Progress,
}

/// Runs the tasks without intact files on [`jobs`] threads. The first error of a file ends the run.
fn run_all(args: &SweepArgs, dir: &Path, tasks: &[Task]) -> Result<Summary, Failure> {
    let machine = Machine::this();
    let jobs = jobs(args, tasks);
    let shared = Mutex::new(Shared {
        next: tasks.iter(),
        summary: Summary {
            tasks: tasks.len(),
            jobs,
            machine: machine.id.clone(),
            ..Summary::default()
        },
        error: None,
        progress: Progress::of_units("sweep", Some(tasks.len() as u64), "tasks"),
    });
    let lock = || shared.lock().unwrap_or_else(PoisonError::into_inner);
    let take = || {
        let mut shared = lock();
        match shared.error {
            None => shared.next.next(),
            Some(_) => None,
        }
    };
    let work = || {
        while let Some(task) = take() {
            let done = ensure(dir, task, &machine, args.retry_failed, store);
            let mut shared = lock();
            match done {
                Ok(done) => count(&mut shared.summary, task, &done),
                Err(EnsureError::Io(error)) => shared.error = Some(Failure::io(dir)(error)),
                Err(EnsureError::Encode(error)) => shared.error = Some(error.into()),
            }
            let summary = &shared.summary;
            shared
                .progress
                .update((summary.run + summary.present) as u64);
        }
    };
    thread::scope(|scope| {
        for _ in 1..jobs {
            scope.spawn(work);
        }
        work();
    });
    let shared = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    match shared.error {
        Some(error) => Err(error),
        None => Ok(shared.summary),
    }
}

fn jobs(args: &SweepArgs, tasks: &[Task]) -> usize {
    let timed = tasks.iter().any(|task| task.content.repetitions > 0);
    match args.jobs {
        Some(jobs) => usize::from(jobs),
        None if timed => 1,
        None => thread::available_parallelism().map_or(1, usize::from),
    }
}

/// Adds a task to the counts, and prints its error.
fn count(summary: &mut Summary, task: &Task, done: &Ensured) {
    summary.run += usize::from(done.run);
    summary.present += usize::from(!done.run);
    summary.damaged += usize::from(done.damaged);
    summary.failed += usize::from(done.failed);
    if let Some(error) = &done.error {
        print_status(&format!("task {}, {}: {error}", task.name, task.trace));
    }
}

/// Stores the file of a task. A signal removes the temporary file.
fn store(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let (part, _remove_on_signal) = interrupt::make(|| PartFile::create(dir), PartFile::path)?;
    part.finish(dir, name, bytes)
}
