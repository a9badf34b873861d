//! Arguments of `sweep`.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use ringfence_sweep::Shard;

pub(super) const SWEEP_LONG: &str = "\
Run a plan of traces, modes and parameters; write one Parquet file for each task.

A plan is a TOML file (docs/SWEEP.md). A task is one replay of one trace in one mode. Its name is \
a digest of all that its result depends on: the bytes of the trace, the mode, the parameters and \
the version of the program. A task whose file exists and is intact is not run again, so an \
interrupted sweep goes on where it ended, and processes and machines may share a directory. A task \
that fails is a row with its error.";

const SWEEP_EXAMPLES: &str = "\
Examples:
  ringfence sweep plan.toml -o results                all tasks, on all processors
  ringfence sweep plan.toml --shard 1/4 -o results    the first of four disjoint parts
  ringfence sweep plan.toml --list > tasks.jsonl      tasks as JSON lines, for a scheduler
  ringfence sweep tasks.jsonl --shard 7/100 -o results
  ringfence sweep plan.toml --task NAME -o results    one task

Exit codes: 0 done, 1 error or a failed task, 2 wrong usage, 130 ended by a signal (complete files \
stay, and no others).";

/// Arguments of `sweep`.
#[derive(Debug, Args)]
#[command(after_help = SWEEP_EXAMPLES)]
pub(crate) struct SweepArgs {
    /// Plan in TOML, or a list of tasks of --list, whose name ends in .jsonl
    #[arg(value_name = "PLAN", value_hint = ValueHint::FilePath)]
    pub plan: PathBuf,

    /// Directory for the files; created if it does not exist
    #[arg(
        short,
        long,
        value_name = "DIR",
        value_hint = ValueHint::DirPath,
        required_unless_present = "list",
    )]
    pub out: Option<PathBuf>,

    /// Run only part I of N of the tasks; all parts together are the whole plan
    #[arg(long, value_name = "I/N", default_value_t = Shard::WHOLE)]
    pub shard: Shard,

    /// Run only the task of this name
    #[arg(long, value_name = "NAME", conflicts_with = "shard")]
    pub task: Option<String>,

    /// Tasks that run at once [default: the number of processors; 1 with repetitions, because
    /// parallel tasks disturb measured cycles]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: Option<u16>,

    /// Run tasks again whose files say that they failed
    #[arg(long)]
    pub retry_failed: bool,

    /// Print the tasks as JSON lines and run none
    #[arg(long, conflicts_with_all = ["out", "jobs", "retry_failed", "json"])]
    pub list: bool,

    /// Print a JSON object with the counts of tasks
    #[arg(long)]
    pub json: bool,
}
