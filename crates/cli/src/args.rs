//! The command line.

mod attack;
mod compare;
mod disk;
mod guest;
mod limits;
mod live;
mod report;
mod reproduce;
mod size;
mod sweep;
mod trace;
mod values;

pub(crate) use attack::AttackArgs;
pub(crate) use compare::{CompareArgs, Frames, ReplayArgs};
pub(crate) use disk::{DiskArg, DiskBusArg, DiskModeArg, IommuKind};
pub(crate) use guest::GuestCommand;
pub(crate) use guest::{
    Datagrams, GuestArgs, GuestBenchNetArgs, GuestBenchReadArgs, GuestPrepareArgs, GuestRunArgs,
    GuestVerifyQemuArgs, ModuleArgs,
};
pub(crate) use limits::{ReplayLimitArgs, TraceLimitArgs};
pub(crate) use live::{DeviceArgs, GuestLimitArgs};
pub(crate) use live::{ServeArgs, TopArgs};
pub(crate) use report::ReportArgs;
pub(crate) use reproduce::{ReproduceArgs, ReproduceGuestArgs, ReproduceLoadArgs};
pub(crate) use size::SizeArgs;
pub(crate) use sweep::SweepArgs;
pub(crate) use trace::{
    AnonymiseArgs, ConvertArgs, InfoArgs, JudgeArgs, MAX_BUFFER_MIB, RecordArgs, TraceCommand,
    VerifyArgs,
};

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;

use values::percent;

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 error, 2 wrong usage or a condition on a field that was not measured, 3 a \
condition of --fail-if or --max-regression holds, 130 ended by a signal (unfinished files are \
removed). A closed standard output (`| head`) is no error and changes no exit code.";

/// Measure the cost of DMA protection on your workload and its exposure, and find better modes.
#[derive(Debug, Parser)]
#[command(
    name = "ringfence",
    version,
    after_help = EXIT_CODES,
    mut_subcommands = accept_negative_numbers,
)]
pub(crate) struct Cli {
    /// Subcommand to run.
    #[command(subcommand)]
    pub command: Command,
}

/// Lets options take a negative number as their value, so that the error names the valid values.
fn accept_negative_numbers(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| {
            let is_path = arg.is_positional() || arg.get_value_hint() != ValueHint::Unknown;
            let accepts = arg.get_action().takes_values() && !is_path;
            arg.allow_negative_numbers(accepts)
        })
        .mut_subcommands(accept_negative_numbers)
}

/// Subcommand to run.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Replay traces through protection modes; print the cost and the exposure of each
    #[command(long_about = compare::COMPARE_LONG)]
    Compare(Box<CompareArgs>),
    /// Write one page on traces: the mode to use, its cost, and its exposure
    #[command(long_about = report::REPORT_LONG)]
    Report(Box<ReportArgs>),
    /// Execute attack classes on protection modes under the oracle; print which succeed
    #[command(long_about = attack::ATTACK_LONG)]
    Attack(AttackArgs),
    /// Compute the sizes of rings and of the IOTLB that a trace needs
    #[command(long_about = size::SIZE_LONG)]
    Size(SizeArgs),
    /// Run a plan of traces, modes and parameters; write one Parquet file for each task
    #[command(long_about = sweep::SWEEP_LONG)]
    Sweep(SweepArgs),
    /// Print the modes: the choice on each of four axes, the promised safety and its bound
    Modes(ModesArgs),
    /// Compare two reports of `compare --json`
    Diff(DiffArgs),
    /// Run the experiments of the rIOMMU, EIOVAR, Fujita and PVIOMMU papers; print their numbers
    /// next to the numbers measured here
    #[command(long_about = reproduce::REPRODUCE_LONG)]
    Reproduce(ReproduceArgs),
    /// Analyse, record, anonymise and convert traces
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Serve virtio devices to a QEMU; a virtio-iommu translates all their DMA
    #[command(long_about = live::SERVE_LONG)]
    Serve(ServeArgs),
    /// Show the activity of the devices of a `serve` or `guest run`
    #[command(long_about = live::TOP_LONG)]
    Top(TopArgs),
    /// Boot a stock Debian guest with devices that run in this process
    #[command(subcommand)]
    Guest(GuestCommand),
    /// Serve the disk of `--disk mode=sandbox`, which starts this command
    #[command(hide = true)]
    Device,
    /// Measure this machine and write a cost profile for `compare --profile`
    #[command(long_about = CALIBRATE_LONG)]
    Calibrate(CalibrateArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
    /// Print the manual page, or write one per subcommand
    Man(ManArgs),
}

/// Form of the output.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct Format {
    /// One JSON object (docs/JSON.md)
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Rows as comma-separated values
    #[arg(long, help_heading = "Output")]
    pub csv: bool,
    /// Tables in Markdown
    #[arg(long, help_heading = "Output")]
    pub markdown: bool,
}

/// Arguments of `modes`.
#[derive(Debug, Args)]
pub(crate) struct ModesArgs {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

const DIFF_EXAMPLES: &str = "\
Example:
  ringfence compare --json > before.json
  ringfence compare --json > after.json
  ringfence diff before.json after.json --max-regression 20

Exit codes: 0 done, 1 error, 2 wrong usage or, with --max-regression, reports that did not measure \
the same, 3 a row got worse than --max-regression allows.";

/// Arguments of `diff`.
#[derive(Debug, Args)]
#[command(after_help = DIFF_EXAMPLES)]
pub(crate) struct DiffArgs {
    /// The first report
    #[arg(value_name = "A.json", value_hint = ValueHint::FilePath)]
    pub before: PathBuf,
    /// The second report
    #[arg(value_name = "B.json", value_hint = ValueHint::FilePath)]
    pub after: PathBuf,
    /// Exit with code 3 if a row of B costs more than PERCENT more cycles than in A, exposes more,
    /// or is missing
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub max_regression: Option<f64>,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

const CALIBRATE_LONG: &str = "\
Measure this machine and write a cost profile for `compare --profile`.

The command measures what a user program can execute: reading the cycle counter, storing a table \
entry, writing back a line and waiting for it. An IOTLB invalidation, an IOTLB miss and a packet \
without protection come from r210-2015. The file states the origin of every number; edit the \
numbers that you know.

--host measures the invalidation with the function profiler of Linux, or its function graph \
tracer, as root. It times the functions that map, unmap and invalidate while the machine performs \
I/O for --seconds: start the I/O first. The kernel needs CONFIG_FUNCTION_PROFILER or \
CONFIG_FUNCTION_GRAPH_TRACER. The profile contains only what was measured.";

/// Arguments of `calibrate`.
#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// Measure the kernel's IOMMU driver during I/O; needs root and Linux
    #[arg(long)]
    pub host: bool,
    /// Duration of the measurement
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(0..=3600),
        requires = "host",
    )]
    pub seconds: u64,
    /// Mount point of tracefs
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/sys/kernel/tracing",
        requires = "host",
        value_hint = ValueHint::DirPath,
    )]
    pub tracefs: PathBuf,
    /// Output file for the profile [default: standard output]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub out: Option<PathBuf>,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to complete for
    pub shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Write one page per subcommand into this directory, instead of one page to standard output
    #[arg(value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// A comment on a subcommand's variant replaces the long help of its arguments.
    #[test]
    fn subcommands_print_their_long_help() {
        let mut cli = Cli::command();
        cli.build();
        let trace = cli.find_subcommand_mut("trace").unwrap();
        for (name, text) in [
            ("judge", trace::JUDGE_LONG),
            ("verify", trace::VERIFY_LONG),
            ("convert", trace::CONVERT_LONG),
        ] {
            let long = trace.find_subcommand(name).unwrap().get_long_about();
            assert_eq!(
                long.map(ToString::to_string).as_deref(),
                Some(text),
                "{name}"
            );
        }
    }
}
