//! The command line of `trace`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand, ValueHint};

use ringfence_trace::{JudgeOptions, StaleWindow};
use ringfence_types::{Nanos, Pfn, PfnRange};

use super::TraceLimitArgs;
use super::limits::{DeviceLimitArgs, size};
use super::values::{kernel_page_shift, nanos, seconds};

/// Subcommands of `trace`.
#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Print statistics of a trace: devices, order of unmaps, sizes, reuse, bursts
    Info(InfoArgs),
    /// Record the DMA mappings of this host (root; Linux 6.12 or later)
    Record(RecordArgs),
    /// Rename addresses, devices and tasks; keep the structure
    Anonymise(AnonymiseArgs),
    /// Compare the addresses that the kernel recorded with those of the model of its allocator
    #[command(long_about = VERIFY_LONG)]
    Verify(VerifyArgs),
    /// Report pages that were reallocated while a device could still reach them
    #[command(long_about = JUDGE_LONG)]
    Judge(JudgeArgs),
    /// Write a trace's operations as Parquet, for tools that read tables; `compare` reads it too
    #[command(long_about = CONVERT_LONG)]
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

/// Arguments of a recording.
#[derive(Debug, Args)]
pub(crate) struct RecordingArgs {
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
    /// Record the events of the page allocator too, for `trace judge`
    #[arg(long)]
    pub pages: bool,
    /// Buffer and tracefs of the recording.
    #[command(flatten)]
    pub recording: RecordingArgs,
}

pub(crate) const JUDGE_LONG: &str = "\
Report pages that were reallocated while a device could still reach them.

In the IOMMU's lazy mode, Linux flushes the IOTLB some milliseconds after an unmap. A page that is \
freed and allocated again in between belongs to its new owner, and the device still reaches it. \
The command finds such pages in a trace with the events of the page allocator, which `trace record \
--pages` and --record write. It needs no change of the kernel.

The trace shows no flush. The window after an unmap is an upper bound: that of Linux's flush \
queue, or --window. A recording has the types of the IOMMU domains; in a strict domain, a window \
has no length. docs/JUDGE.md explains the report and what a trace does not show.";

const JUDGE_EXAMPLES: &str = "\
Examples:
  sudo ringfence trace judge --record 10
  sudo ringfence trace judge --record 10 --keep host.trace.zst
  sudo ringfence trace record --pages -o fio.trace.zst -- fio job.fio
  ringfence trace judge fio.trace.zst
  ringfence trace judge --window 1ms --json fio.trace.zst

Exit codes: 0 no such page is seen, 1 error, 2 wrong usage, 3 a device could reach a reallocated \
page. If events are lost, 0 proves nothing.";

const JUDGE_BUFFER: &str = "Buffer size per CPU for --record; events that do not fit are lost";
const JUDGE_TRACEFS: &str = "Mount point of tracefs for --record";

/// Arguments of `trace judge`.
#[derive(Debug, Args)]
#[command(
    after_help = JUDGE_EXAMPLES,
    group = ArgGroup::new("source").required(true).args(["traces", "record"]),
    mut_arg("buffer", |buffer| buffer.help(JUDGE_BUFFER).conflicts_with("traces")),
    mut_arg("tracefs", |tracefs| tracefs.help(JUDGE_TRACEFS).conflicts_with("traces")),
)]
pub(crate) struct JudgeArgs {
    /// Traces with the events of the page allocator; - is standard input
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub traces: Vec<PathBuf>,
    /// Record this host for this many seconds and judge the recording (root; Linux 6.12 or later)
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub record: Option<Duration>,
    /// Keep the recording in this file, readable by the user alone; compressed if the name ends in
    /// .zst
    #[arg(
        long,
        value_name = "FILE",
        requires = "record",
        conflicts_with = "traces",
        value_hint = ValueHint::FilePath
    )]
    pub keep: Option<PathBuf>,
    /// Longest time until the flush, such as 500us, 10ms or 1s [default: the rule of Linux's flush
    /// queue, 10 ms or 256 entries per CPU]
    #[arg(long, value_name = "TIME", value_parser = nanos)]
    pub window: Option<Nanos>,
    /// Page size of the recorded kernel
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = kernel_page_shift)]
    pub page_size: u8,
    /// Print a JSON array with one object per trace (docs/JUDGE.md)
    #[arg(long)]
    pub json: bool,
    /// Count malformed lines instead of stopping at the first
    #[arg(long)]
    pub lenient: bool,
    /// Buffer and tracefs of the recording.
    #[command(flatten)]
    pub recording: RecordingArgs,
    /// Limits on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,
    /// Maximum number of pages that devices can reach at once, each counted once per mapping
    /// [default: 4M]
    #[arg(long, value_name = "N", value_parser = size, help_heading = "Limits")]
    pub max_pages: Option<u64>,
}

impl JudgeArgs {
    /// Returns the options of the judgement.
    pub(crate) fn options(&self) -> JudgeOptions {
        let mut options = JudgeOptions::default();
        if let Some(longest) = self.window {
            options.window = StaleWindow {
                longest,
                queue: None,
            };
        }
        options.page_shift = self.page_size;
        if let Some(pages) = self.max_pages {
            options.pages = usize::try_from(pages).unwrap_or(usize::MAX);
        }
        options
    }
}

/// Arguments of `trace anonymise`.
#[derive(Debug, Args)]
pub(crate) struct AnonymiseArgs {
    /// The trace; it must be a regular file, because it is read twice
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub trace: PathBuf,
    /// Output file; compressed if the name ends in .zst; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Seed of the new layout of memory; keep it secret. Other users of this host can read it in
    /// the list of processes [default: from the system's randomness]
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

pub(crate) const VERIFY_LONG: &str = "\
Compare the addresses that the kernel recorded with those of the model of its allocator.

The command repeats the allocations and frees of a trace, in their order and on their CPUs, with \
the allocator of the mode linux-strict: Linux 6.12 to 7.2 on x86, one domain for each PCI \
device, invalidation in strict mode unless --lazy is given. It prints how many allocations get \
the address that the kernel recorded, and the first that does not.

The trace needs the iommu:map and iommu:unmap events, and has to begin before the first mapping \
of each domain: at boot, or before a driver loads for the first time. A trace does not show \
this. Without --from-boot, a difference is therefore not counted against the model.

Exit code 3: with --from-boot, an address differs or the trace allows no conclusion.";

/// Arguments of `trace verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// The trace; - is standard input
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub trace: PathBuf,
    /// The trace begins before the first mapping of each domain; exit with 3 unless all compared
    /// addresses agree
    #[arg(long)]
    pub from_boot: bool,
    /// The kernel ran in lazy mode: compare a domain's addresses until a freed range could come
    /// back from a flush queue
    #[arg(long)]
    pub lazy: bool,
    /// Addresses that the domains reserve, hexadecimal, both ends included: a memory window of the
    /// PCI host bridge ("PCI Bus" in /proc/iomem). The MSI window is always reserved
    #[arg(long, value_name = "FIRST-LAST", value_parser = address_range)]
    pub reserved: Vec<PfnRange>,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    /// Count malformed lines instead of stopping at the first
    #[arg(long)]
    pub lenient: bool,
    /// Limits on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,
    /// Limits on the devices and on their allocators.
    #[command(flatten)]
    pub device_limits: DeviceLimitArgs,
}

/// Parses a range of addresses as in /proc/iomem: `FIRST-LAST`, hexadecimal.
fn address_range(text: &str) -> Result<PfnRange, String> {
    let address = |digits: &str| {
        let digits = digits.strip_prefix("0x").unwrap_or(digits);
        // `from_str_radix` accepts a sign.
        let all_hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let parsed = u64::from_str_radix(digits, 16).ok();
        parsed.filter(|_| all_hexadecimal)
    };
    let parsed = text
        .split_once('-')
        .and_then(|(first, last)| Some((address(first)?, address(last)?)));
    parsed
        .filter(|(first, last)| first <= last)
        .and_then(|(first, last)| PfnRange::inclusive(Pfn::new(first >> 12), Pfn::new(last >> 12)))
        .ok_or_else(|| format!("{text:?} is no range of addresses, such as c0000000-febfffff"))
}

pub(crate) const CONVERT_LONG: &str = "\
Write a trace's operations as Parquet, for tools that read tables.

The file has one row for each operation (map, unmap) or mark, in the order of the trace: time, \
device, CPU, the mapping that pairs an unmap with its map, direction, class, and the segments \
of the buffer. The metadata of the file contains the devices and the summary. `compare` reads \
the file like any trace, with the same results. The file does not contain the lines of the \
trace, which `trace info` and `trace anonymise` need.";

/// Arguments of `trace convert`.
#[derive(Debug, Args)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_ranges_are_hexadecimal_and_cover_whole_pages() {
        let cases = [
            ("1000-1fff", Some((1, 1))),
            ("1fff-2000", Some((1, 2))),
            ("0xc0000000-0xfebfffff", Some((0xc_0000, 0xf_ebff))),
            ("0-0", Some((0, 0))),
            ("C0000000-FEBFFFFF", Some((0xc_0000, 0xf_ebff))),
            ("1-0", None),
            ("1fff-1000", None),
            ("+1000-+1fff", None),
            ("0x+1000-1fff", None),
            ("1000--1fff", None),
            ("0x0x1000-1fff", None),
            ("1000-", None),
            ("-1000", None),
            ("1000-g", None),
            ("1000-10000000000000000", None),
        ];
        for (text, pages) in cases {
            let range = |(first, last)| PfnRange::inclusive(Pfn::new(first), Pfn::new(last));
            assert_eq!(address_range(text).ok(), pages.and_then(range), "{text}");
        }
    }
}
