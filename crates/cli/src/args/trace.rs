//! The command line of `trace`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand, ValueHint};

use super::TraceLimitArgs;
use super::values::seconds;

/// Subcommands of `trace`.
#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Print statistics of a trace: devices, order of unmaps, sizes, reuse, bursts
    Info(InfoArgs),
    /// Record the DMA mappings of this host (root; Linux 6.12 or later)
    Record(RecordArgs),
    /// Rename addresses, devices and tasks; keep the structure
    Anonymise(AnonymiseArgs),
    /// Write a trace's operations as Parquet, for tools that read tables; `compare` reads it too
    Convert(ConvertArgs),
}

/// Arguments of `trace info`.
#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    /// Traces; - is standard input [default: a bundled sample]
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub traces: Vec<PathBuf>,
    /// Count malformed lines instead of stopping at the first
    #[arg(long)]
    pub lenient: bool,
    /// Print a JSON array with one object per trace
    #[arg(long)]
    pub json: bool,
    /// Limits on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,
}

const RECORD_EXAMPLES: &str = "\
Examples:
  sudo ringfence trace record --seconds 10 -o idle.trace.zst
  sudo ringfence trace record -o download.trace.zst -- curl -so /dev/null https://example.org/file
  ringfence compare download.trace.zst

The recording uses its own tracing instance and removes it at the end, after errors and Ctrl-C \
too. Other tracing on the host is not affected. Without an active IOMMU the kernel prints no \
iommu:* events, so scatterlists and coherent buffers lack addresses.

The command runs as the user of ringfence, under sudo as root. `-- setpriv --reuid USER --regid \
GROUP --init-groups COMMAND` runs it as another user. A trace contains kernel addresses, so \
only the user can read the file.";

/// Arguments of `trace record`.
#[derive(Debug, Args)]
#[command(
    after_help = RECORD_EXAMPLES,
    group = ArgGroup::new("workload").required(true).args(["seconds", "command"]),
)]
pub(crate) struct RecordArgs {
    /// Output file, readable by the user alone; compressed if the name ends in .zst; - is standard
    /// output
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Record for this many seconds
    #[arg(long, value_name = "N", value_parser = seconds)]
    pub seconds: Option<Duration>,
    /// Record while this command runs
    #[arg(value_name = "COMMAND", last = true, value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
    /// Buffer size per CPU; events that do not fit are lost
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_BUFFER_MIB)),
    )]
    pub buffer: u32,
    /// Mount point of tracefs
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/sys/kernel/tracing",
        value_hint = ValueHint::DirPath,
    )]
    pub tracefs: PathBuf,
}

/// Maximum of `--buffer`.
pub(crate) const MAX_BUFFER_MIB: u32 = 65_536;

/// Arguments of `trace anonymise`.
#[derive(Debug, Args)]
pub(crate) struct AnonymiseArgs {
    /// The trace; it must be a regular file, because it is read twice
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub trace: PathBuf,
    /// Output file; compressed if the name ends in .zst; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Seed of the new layout of memory; keep it secret [default: from the system's randomness]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Keep the times of the trace instead of beginning at 0
    #[arg(long)]
    pub keep_times: bool,
    /// Leave out malformed lines instead of stopping at the first
    #[arg(long)]
    pub lenient: bool,
    /// Limits on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,
}

const CONVERT_LONG: &str = "\
Write a trace's operations as Parquet, for tools that read tables.

The file has one row for each operation (map, unmap) or mark, in the order of the trace: time, \
device, CPU, the mapping that pairs an unmap with its map, direction, class, and the segments \
of the buffer. The metadata of the file contains the devices and the summary. `compare` reads \
the file like any trace, with the same results. The file does not contain the lines of the \
trace, which `trace info` and `trace anonymise` need.";

/// Arguments of `trace convert`.
#[derive(Debug, Args)]
#[command(long_about = CONVERT_LONG)]
pub(crate) struct ConvertArgs {
    /// The trace; - is standard input
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub trace: PathBuf,
    /// The Parquet file; its name must end in .parquet; - is standard output
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Leave out malformed lines instead of stopping at the first
    #[arg(long)]
    pub lenient: bool,
    /// Limits on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,
}
