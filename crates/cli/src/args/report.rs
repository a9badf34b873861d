//! Arguments of `report`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::compare::ReplayArgs;

pub(super) const REPORT_LONG: &str = "\
Write one page on traces for a person who decides: the mode to use, its cost, and its exposure.

The page contains the results of `compare`, `size`, `trace info` and `attack` on the same traces \
and modes. It begins with the verdict on each trace. Plots and tables follow: cost against \
exposure, components of the cost, stale windows over time, reuse of pages, bursts of unmaps, sizes \
of rings and of the IOTLB, and the attack matrix. docs/REPORT.md explains them.

The page is one HTML file without references to other files or hosts. It is complete without \
scripts; its own script sorts and filters tables. It follows the light or dark colours of the \
browser, and prints on A4. Names from a trace are text on it and never markup. Its size is \
bounded: it shows 16 traces and 100 rows of each table, and counts the others.";

const REPORT_EXAMPLES: &str = "\
Examples:
  ringfence report -o report.html                     the bundled sample
  ringfence report trace.txt.zst -o report.html       a recording of tracefs, trace-cmd or perf
  ringfence report a.zst b.zst --modes linux-strict,linux-lazy,fence-burst -o report.html
  ringfence report --repeat 0 -o report.html          without cycles: equal on every machine

Exit codes: 0 done, 1 error, 2 wrong usage.";

/// Arguments of `report`.
#[derive(Debug, Args)]
#[command(after_help = REPORT_EXAMPLES)]
pub(crate) struct ReportArgs {
    /// Traces, modes and platform.
    #[command(flatten)]
    pub replay: ReplayArgs,

    /// Output file for the page [default: standard output]
    #[arg(
        short,
        long,
        value_name = "FILE",
        value_hint = ValueHint::FilePath,
        help_heading = "Output",
    )]
    pub out: Option<PathBuf>,
}
