//! Arguments of `size`.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use ringfence_lab::modes::Mode;

use super::values::{paged_mode, ring_entries};
use super::{Format, ReplayLimitArgs, TraceLimitArgs};

pub(super) const SIZE_LONG: &str = "\
Compute the sizes of rings and of the IOTLB that a trace needs.

Each device and direction has a ring. The first pass counts L, the peak number of mapped slots; \
B, the peak number of slots that open bursts withhold; and the order of unmaps. It reports the \
rule N >= L + B, and the smallest N with which no map of this trace stalls. The second pass \
replays the trace with rings of several sizes: a ring that uses only the slot at its tail \
(riommu), and a ring that uses any free slot (riommu-ooo). It reports the maps that waited and \
the prediction of a slot model. It also tries IOTLBs of several shapes in modes that map pages.

Nothing is timed: the numbers are equal on every machine.";

const SIZE_EXAMPLES: &str = "\
Examples:
  ringfence size                                      the bundled sample
  ringfence size trace.txt.zst --plot plots
  zcat trace.gz | ringfence size -
  ringfence size trace.zst --ring-entries 256,512,1024
  ringfence size a.zst b.zst --json > sizes.json      for programs; see docs/JSON.md

Exit codes: 0 done, 1 error, 2 wrong usage.";

/// Arguments of `size`.
#[derive(Debug, Args)]
#[command(after_help = SIZE_EXAMPLES)]
pub(crate) struct SizeArgs {
    /// Traces: text of tracefs, trace-cmd or perf, plain or zstd, or trace-cmd's .dat; - is
    /// standard input [default: a bundled sample]
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub traces: Vec<PathBuf>,

    /// Count only devices of this name. May be repeated
    #[arg(long = "device", value_name = "NAME", help_heading = "Trial")]
    pub devices: Vec<String>,

    /// Count malformed lines instead of stopping at the first
    #[arg(long, help_heading = "Trial")]
    pub lenient: bool,

    /// Sizes to try in every ring [default: around the size that each needs]
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        value_parser = ring_entries,
        help_heading = "Trial",
    )]
    pub ring_entries: Vec<u32>,

    /// Modes for which IOTLBs are tried; they must map pages
    #[arg(
        long,
        value_name = "MODE,...",
        value_delimiter = ',',
        value_parser = paged_mode,
        default_value = "linux-strict,linux-lazy",
        help_heading = "Trial"
    )]
    pub modes: Vec<Mode>,

    /// Cost profile with the modelled walk caches: a name, or a file that `ringfence calibrate`
    /// wrote
    #[arg(
        long,
        value_name = "NAME|FILE",
        default_value = "r210-2015",
        help_heading = "Trial"
    )]
    pub profile: String,

    /// Form of the output.
    #[command(flatten)]
    pub format: Format,

    /// Limits on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,

    /// Limits on the replay.
    #[command(flatten)]
    pub replay_limits: ReplayLimitArgs,

    /// Write SVG plots into this directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Output")]
    pub plot: Option<PathBuf>,
}
