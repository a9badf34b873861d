//! Development tasks of this repository: `cargo xtask test` runs everything that continuous
//! integration runs, `cargo xtask check` its quick static part. See CONTRIBUTING.md.
#![forbid(unsafe_code)]

mod check;
mod commits;
mod console;
mod dist;
mod documents;
mod fuzz;
mod guest;
mod ids;
mod install;
mod limits;
mod lines;
mod links;
mod mutate;
mod nostd;
mod output;
mod page;
mod process;
mod product;
mod python;
mod registry;
mod repo;
mod rules;
mod source;
mod steps;
mod suite;
mod suites;
mod summary;
mod table;
mod targets;
mod usage;
mod violation;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::repo::Repo;

/// Runs the development tasks of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs everything: installs tools, then checks, tests, fuzzes and runs the documentation.
    Test {
        /// Runs only the steps whose names contain PATTERN; may be given more than once.
        #[arg(long, value_name = "PATTERN")]
        only: Vec<String>,
    },
    /// Runs the quick static part: format, lints, the rules on sources, documents.
    Check,
    /// Applies each committed mutation to a scratch copy and requires the tests to fail.
    Mutate(mutate::Options),
    /// Runs the fuzz targets: with cargo-fuzz if a nightly toolchain is installed, and on stable.
    Fuzz {
        /// Runs only this target.
        target: Option<String>,
        /// Run time of each target in seconds.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Records a trace on a stock kernel in a guest and checks it, or tests the devices of guests.
    /// Fetches a kernel once.
    Guest(guest::Options),
    /// Tests other architectures: all core crates on 32-bit and big-endian CPUs, and the command on
    /// arm64 and riscv64. Takes half an hour.
    Targets,
    /// Packs the command, its manual pages, completions and module sources: an archive and a Debian
    /// package in the target directory.
    Dist(dist::Options),
    /// Checks docs/IDS.md and counts planned ids.
    Ids,
    /// Counts the lines of code of each crate without tests.
    Lines,
}

fn main() -> ExitCode {
    match run(&Arguments::parse().task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a task. `Ok(false)`: the task ran, found a problem and printed it.
fn run(task: &Task) -> anyhow::Result<bool> {
    let repo = Repo::find()?;
    match task {
        Task::Test { only } => steps::run_all(&repo, suite::chosen(only)?),
        Task::Check => steps::run_all(&repo, suite::check()),
        Task::Mutate(options) => mutate::run(&repo, options),
        Task::Fuzz { target, seconds } => {
            steps::run_all(&repo, suite::fuzz(&repo, target.as_deref(), *seconds)?)
        }
        Task::Guest(options) => guest::run(&repo, options),
        Task::Targets => targets::run(&repo),
        Task::Dist(options) => dist::run(&repo, options),
        Task::Ids => ids::print(&repo),
        Task::Lines => lines::print(&repo),
    }
}
