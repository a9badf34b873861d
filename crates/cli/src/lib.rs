//! The command `ringfence`: measures the cost of DMA protection for a workload and its exposure,
//! and recommends better modes.
//!
//! This is a library so that Cargo compiles it in parallel with the `lab` crate; a binary would
//! wait for that crate. It is not a public interface.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod directory;
mod failure;
mod function_profiler;
mod graph_tracer;
mod inputs;
mod interrupt;
mod out_file;
mod output;
mod profiler_switch;
mod progress;
mod same_file;
mod spool;
mod spool_limit;
mod tracefs;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::failure::Failure;

/// Runs the command line and returns the exit code of the process.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        // The exit code is that of the guest.
        Command::Guest(command) => commands::guest(&command),
        Command::Serve(args) => commands::serve(&args),
        other => run(other).map(|()| ExitCode::SUCCESS),
    };
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            failure.report();
            failure.exit_code()
        }
    }
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Compare(args) => commands::compare(&args),
        Command::Report(args) => commands::report(&args),
        Command::Attack(args) => commands::attack(&args),
        Command::Size(args) => commands::size(&args),
        Command::Sweep(args) => commands::sweep(&args),
        Command::Modes(args) => commands::modes(&args),
        Command::Reproduce(args) => commands::reproduce(&args),
        Command::Diff(args) => commands::diff(&args),
        Command::Trace(command) => commands::trace(command),
        Command::Top(args) => commands::top(&args),
        Command::Device => commands::device(),
        Command::Guest(_) | Command::Serve(_) => Ok(()),
        Command::Calibrate(args) => commands::calibrate(&args),
        Command::Completions(args) => commands::completions(&args),
        Command::Man(args) => commands::man(&args),
    }
}
