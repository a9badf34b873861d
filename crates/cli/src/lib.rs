//! The command `ringfence`: what DMA protection costs on a workload, what it leaves exposed, and
//! what would be better.
//!
//! A library, so that it is compiled beside the laboratory: a program would have to wait for that.
//! Nobody else is meant to use it.
#![forbid(unsafe_code)]

mod args;
mod commands;
#[cfg(feature = "live")]
mod directory;
mod failure;
mod input_file;
mod inputs;
mod interrupt;
mod out_file;
mod output;
mod profile_file;
mod progress;
mod spool;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::failure::Failure;

/// Does what the command line asks for, and says what the process is to end with.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        // Its exit code is the guest's.
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
        Command::Size(args) => commands::size(&args),
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
