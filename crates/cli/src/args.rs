//! The command line.

mod limits;
// A build without them parses their arguments to say what is missing.
#[cfg_attr(not(feature = "live"), allow(dead_code))]
mod live;

#[cfg(feature = "live")]
pub(crate) use live::{
    DeviceArgs, GuestArgs, GuestJudgeArgs, GuestLimitArgs, GuestPrepareArgs, GuestReadsArgs,
    GuestRunArgs, ModuleArgs,
};
pub(crate) use live::{GuestCommand, ServeArgs, TopArgs};

pub(crate) use limits::{ReplayLimitArgs, TraceLimitArgs};

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use ringfence_lab::LabError;
use ringfence_lab::compose::compose;
use ringfence_lab::experiments::Experiment;
use ringfence_lab::experiments::guests::{Configuration, Kind};
use ringfence_lab::guest::Cycles;
use ringfence_lab::modes::Mode;
use ringfence_report::{Condition, ConditionError};

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 error, 2 wrong usage or a condition on what was not measured, 3 a condition of --fail-if or --fail-over holds, \
130 ended by a signal, with unfinished files removed.";

/// What DMA protection costs on your workload, what it leaves exposed, and what would be better.
#[derive(Debug, Parser)]
#[command(name = "ringfence", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Replay traces through protection modes; print what each costs and what it exposes
    #[command(long_about = COMPARE_LONG)]
    Compare(Box<CompareArgs>),
    /// Say how large a trace wants its rings and its IOTLB
    #[command(long_about = SIZE_LONG)]
    Size(SizeArgs),
    /// Print the modes: four answers, a promise and its bound each
    Modes(ModesArgs),
    /// Compare two reports of `compare --json`
    Diff(DiffArgs),
    /// Run the experiments of the rIOMMU, EIOVAR, Fujita and PVIOMMU documents; print them beside
    /// what was measured here
    #[command(long_about = REPRODUCE_LONG)]
    Reproduce(ReproduceArgs),
    /// Look at traces, record them, make them fit to be shared
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Serve virtio devices to a QEMU, every DMA of theirs behind a virtio-iommu
    #[command(long_about = live::SERVE_LONG)]
    Serve(ServeArgs),
    /// Show what the devices of a `serve` or `guest run` are doing
    #[command(long_about = live::TOP_LONG)]
    Top(TopArgs),
    /// Boot a stock Debian guest whose devices live in this process
    #[command(subcommand)]
    Guest(GuestCommand),
    /// Be a device of `serve --isolate`; started by it
    #[command(hide = true)]
    Device,
    /// Measure this machine and write a cost profile for `compare --profile`
    #[command(long_about = CALIBRATE_LONG)]
    Calibrate(CalibrateArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
    /// Print the manual page, or write one a subcommand
    Man(ManArgs),
}

const COMPARE_LONG: &str = "\
Replay traces through protection modes; print what each costs and what it exposes.

Each trace is replayed twice in every mode under an oracle that knows which byte is granted to which device: once with a device that \
does what the trace implies (metered), once with an attacker that touches every buffer it has lost. A third, timed run measures the \
mapping layer alone. Cycles are executed by this processor, but for the invalidation of the IOTLB, which no user program can execute: \
it is charged by the cost profile, and every report says how much of a row that is.

relative_throughput = c / (c + map + unmap): a packet that costs c cycles without protection costs c + map + unmap with it. c comes \
from the profile (908 for r210-2015: half of a packet of two mappings) or from --c-none.

Why fence and fence-burst stand side by side: an invalidation that is charged at every unmap caps a mode at c / (c + invalidation), \
0.30 under r210-2015, whatever its software does; fence is the best that can be done there. What helps on today's hardware is to \
invalidate once for a burst of unmaps and to withhold the buffers until then: fence-burst, as strict, for a short delay of release.";

const COMPARE_EXAMPLES: &str = "\
Examples:
  ringfence compare                                   the bundled sample, all modes
  ringfence compare trace.txt.zst                     a recording of tracefs, trace-cmd or perf
  zcat trace.gz | ringfence compare -                 from standard input
  ringfence compare a.zst b.zst --json > now.json     for programs; see docs/JSON.md
  ringfence compare --modes linux-strict,linux-lazy,fence,fence-burst --plot plots
  ringfence compare --mode alloc=eiovar-64,table=cached-radix,flush=burst
  ringfence compare --mode alloc=table-bitmap,table=flat,flush=per-wrap
  ringfence compare --iotlb 64x8 --coherent --c-none 2500
  ringfence compare --fail-if 'fence:violations>0,false_faults>0'

A condition on what was not measured (cycles with --repeat 0, violations with --no-hostile) and one on a trace without a map are wrong usage.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 a condition of --fail-if holds.";

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(after_help = COMPARE_EXAMPLES)]
pub(crate) struct CompareArgs {
    /// Traces: text of tracefs, trace-cmd or perf, plain or zstd, or trace-cmd's .dat; - is
    /// standard input [default: a bundled sample]
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub traces: Vec<PathBuf>,

    /// Modes by name, in the order of the rows [default: all of `ringfence modes`]
    #[arg(long, value_name = "MODE,...", value_delimiter = ',', value_parser = named_mode, help_heading = "Modes")]
    pub modes: Vec<Mode>,

    /// A mode of your own, beside the others; `ringfence modes` shows the answers. May be repeated
    #[arg(long = "mode", value_name = "alloc=A,table=T,flush=F", value_parser = |row: &str| compose(row), help_heading = "Modes")]
    pub composed: Vec<Mode>,

    /// Only devices of this name. May be repeated
    #[arg(long = "device", value_name = "NAME", help_heading = "Replay")]
    pub devices: Vec<String>,

    /// Count malformed lines instead of stopping at the first
    #[arg(long, help_heading = "Replay")]
    pub lenient: bool,

    /// Leave the attacker out: no claim about safety
    #[arg(long, help_heading = "Replay")]
    pub no_hostile: bool,

    /// Timed repetitions; 0 measures no cycles [default: 3, more for short traces]
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = repetitions, help_heading = "Replay")]
    pub repeat: Option<usize>,

    /// Cost profile, by name or as a file that `ringfence calibrate` wrote
    #[arg(
        long,
        value_name = "NAME|FILE",
        default_value = "r210-2015",
        help_heading = "Platform"
    )]
    pub profile: String,

    /// Cycles that a packet costs without protection, per mapping [default: from the profile]
    #[arg(long, allow_negative_numbers = true, value_name = "CYCLES", value_parser = positive, help_heading = "Platform")]
    pub c_none: Option<f64>,

    /// Geometry of the IOTLB [default: from the profile]
    #[arg(long, allow_negative_numbers = true, value_name = "SETSxWAYS", value_parser = iotlb, help_heading = "Platform")]
    pub iotlb: Option<(u32, u32)>,

    /// Entries of the page-walk caches of levels 1, 2 and 3 [default: from the profile]
    #[arg(long, value_name = "A,B,C", value_parser = walk_cache, help_heading = "Platform")]
    pub walk_cache: Option<[u32; 3]>,

    /// The walker snoops the caches [default: from the profile]
    #[arg(long, conflicts_with = "non_coherent", help_heading = "Platform")]
    pub coherent: bool,

    /// The walker does not: every touched line is written back
    #[arg(long, help_heading = "Platform")]
    pub non_coherent: bool,

    /// Slots of every ring in the modes with rings [default: twice the slots mapped at once,
    /// counted before the replay]
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = ring_entries, help_heading = "Platform")]
    pub ring_entries: Option<u32>,

    /// T of modes with a reverse translation cache: how long a cycle of it lasts
    #[arg(long, allow_negative_numbers = true, value_name = "SECONDS", default_value = "10", value_parser = cycle_ns, help_heading = "Replay")]
    pub cache_cycle: u64,

    /// C of modes with a reverse translation cache: how many whole cycles it keeps what nobody uses
    #[arg(long, allow_negative_numbers = true, value_name = "C", default_value = "3", value_parser = cycles, help_heading = "Replay")]
    pub cache_cycles: Cycles,

    /// Form of the output.
    #[command(flatten)]
    pub format: Format,

    /// Bounds on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,

    /// Bounds on the replay.
    #[command(flatten)]
    pub replay_limits: ReplayLimitArgs,

    /// Write SVG plots into this directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Output")]
    pub plot: Option<PathBuf>,

    // The brackets are the help text's, not a link.
    #[allow(rustdoc::broken_intra_doc_links)]
    /// End with code 3 if this holds for a row: [MODE:]FIELD OP NUMBER, several joined by commas.
    /// FIELD is a field of a JSON row (docs/JSON.md)
    #[arg(long, value_name = "CONDITION", value_parser = conditions, help_heading = "Output")]
    pub fail_if: Vec<std::vec::Vec<Condition>>,
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

const SIZE_LONG: &str = "\
Say how large a trace wants its rings and its IOTLB.

A ring is a device and a direction. A first pass counts: L, most slots mapped at once; B, most slots withheld at once until the end of a \
burst; in which order unmaps come. From that follow N >= L + B, and the fewest slots with which this trace stalls no map. A second pass \
replays the trace with rings of several sizes, once with a ring that takes only the slot at its tail (riommu) and once with one that takes \
any free slot (riommu-ooo), and says how many maps waited, beside what a model of slots predicts. The same pass tries IOTLBs of several \
shapes under modes that map pages.

Nothing is timed: the numbers are the same on every machine.";

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

    /// Only devices of this name. May be repeated
    #[arg(long = "device", value_name = "NAME", help_heading = "Trial")]
    pub devices: Vec<String>,

    /// Count malformed lines instead of stopping at the first
    #[arg(long, help_heading = "Trial")]
    pub lenient: bool,

    /// Sizes to try in every ring [default: around what each needs]
    #[arg(long, allow_negative_numbers = true, value_name = "N,...", value_delimiter = ',', value_parser = ring_entries, help_heading = "Trial")]
    pub ring_entries: Vec<u32>,

    /// Modes under which the IOTLB is looked at: those that map pages
    #[arg(
        long,
        value_name = "MODE,...",
        value_delimiter = ',',
        value_parser = paged_mode,
        default_value = "linux-strict,linux-lazy",
        help_heading = "Trial"
    )]
    pub modes: Vec<Mode>,

    /// Cost profile whose walk caches are modelled, by name or as a file that `ringfence calibrate`
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

    /// Bounds on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,

    /// Bounds on the replay.
    #[command(flatten)]
    pub replay_limits: ReplayLimitArgs,

    /// Write SVG plots into this directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Output")]
    pub plot: Option<PathBuf>,
}

/// Arguments of `modes`.
#[derive(Debug, Args)]
pub(crate) struct ModesArgs {
    /// As a JSON array
    #[arg(long)]
    pub json: bool,
}

const DIFF_EXAMPLES: &str = "\
Example:
  ringfence compare --json > before.json
  ringfence compare --json > after.json
  ringfence diff before.json after.json --fail-over 20

Exit codes: 0 done, 1 error, 2 wrong usage or, with --fail-over, reports that did not measure the same, 3 a row got worse than --fail-over allows.";

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
    /// End with code 3 if a row of B costs more than PERCENT more cycles than in A, exposes more,
    /// or is missing
    #[arg(long, allow_negative_numbers = true, value_name = "PERCENT", value_parser = percent)]
    pub fail_over: Option<f64>,
    /// As a JSON object
    #[arg(long)]
    pub json: bool,
}

const REPRODUCE_LONG: &str = "\
Run the experiments of the rIOMMU, EIOVAR, Fujita and PVIOMMU documents; print them beside what was measured here.

For each number: what the document prints, what was measured, their ratio, and which part of a cost this processor executed and which \
the profile r210-2015 charged: invalidations, IOTLB misses, and what a packet costs without protection. The verdict follows from the \
rows alone. reproduced: every order is the document's and every number within 15%. ordering only: numbers are further off. differs: an \
order or an exact number is another one. docs/REPRODUCE.md says how to read the rest.";

const REPRODUCE_EXAMPLES: &str = "\
Examples:
  ringfence reproduce --list
  ringfence reproduce X10 X13
  ringfence reproduce --all --out findings            a page, JSON and text in one directory
  ringfence reproduce --all --json > findings.json
  ringfence reproduce X07 --trace traces/*.zst        recorded devices beside synthetic rings
  ringfence reproduce X21                             boots guests; fetches what they need (see guest run)
  ringfence reproduce X21 --guest-kind emulated --guest-configuration pviommu+rtc,virtio-strict";

/// Arguments of `reproduce`.
#[derive(Debug, Args)]
#[command(after_help = REPRODUCE_EXAMPLES, group = ArgGroup::new("which").required(true).multiple(false).args(["ids", "all", "list"]))]
pub(crate) struct ReproduceArgs {
    /// Experiments by id
    #[arg(value_name = "ID", value_parser = experiment)]
    pub ids: Vec<&'static Experiment>,
    /// All experiments
    #[arg(long)]
    pub all: bool,
    /// Print what there is, and run nothing
    #[arg(long)]
    pub list: bool,
    /// Recorded traces for X07, which feeds their devices to the prefetchers as well, and for X22,
    /// which counts how often they map their pages again
    #[arg(long = "trace", value_name = "FILE", num_args = 1.., conflicts_with = "list", value_hint = ValueHint::FilePath)]
    pub traces: Vec<PathBuf>,
    /// Also write a page, JSON and text into this directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub out: Option<PathBuf>,
    /// One JSON object (docs/REPRODUCE.md)
    #[arg(long)]
    pub json: bool,
    /// Guests.
    #[command(flatten)]
    pub guests: ReproduceGuestArgs,
}

/// The guests of X21. With --all they are booted only if what they need is there.
#[derive(Debug, Args)]
#[command(next_help_heading = "Guests of X21")]
pub(crate) struct ReproduceGuestArgs {
    /// Where what was fetched for guests is kept
    #[arg(long, value_name = "DIR", default_value = "target/guest", value_hint = ValueHint::DirPath)]
    pub guest_cache: PathBuf,
    /// Their kernel, as `guest run --kernel` takes it
    #[arg(long, value_name = "VERSION", default_value = "6.12")]
    pub guest_kernel: String,
    /// Longest life of each in seconds
    #[arg(long, allow_negative_numbers = true, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub guest_limit: u64,
    /// With these kinds of device only: assigned, emulated, simulated, many-queues
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_parser = kind)]
    pub guest_kind: Vec<Kind>,
    /// In these configurations only: kvm-baseline, pviommu, rtc-literal, pviommu+rtc,
    /// pviommu+rtc+hopt, virtio-strict, virtio-lazy
    #[arg(long, value_name = "CONFIGURATION", value_delimiter = ',', value_parser = configuration)]
    pub guest_configuration: Vec<Configuration>,
    /// Where the modules' sources are
    #[arg(long, value_name = "DIR", default_value = "kmod", value_hint = ValueHint::DirPath)]
    pub module_source: PathBuf,
}

/// What to do with traces.
#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Print what a trace is like: devices, order of unmaps, sizes, reuse, bursts
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
    /// A JSON array with an object a trace
    #[arg(long)]
    pub json: bool,
    /// Bounds on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,
}

const RECORD_EXAMPLES: &str = "\
Examples:
  sudo ringfence trace record --seconds 10 -o idle.trace.zst
  sudo ringfence trace record -o download.trace.zst -- curl -so /dev/null https://example.org/file
  ringfence compare download.trace.zst

The recording uses a tracing instance of its own and removes it at its end, on errors and on Ctrl-C too; other tracing on the host is \
not touched. Without an IOMMU in use the kernel prints no iommu:* events: then scatterlists and coherent buffers lack addresses.

The command runs as the user that runs ringfence, under sudo as root: `-- setpriv --reuid USER --regid GROUP --init-groups COMMAND` runs \
it as another. A trace holds the kernel's addresses: the file can be read by its user alone.";

/// Arguments of `trace record`.
#[derive(Debug, Args)]
#[command(after_help = RECORD_EXAMPLES, group = ArgGroup::new("workload").required(true).args(["seconds", "command"]))]
pub(crate) struct RecordArgs {
    /// Where the trace goes, readable by the user alone; compressed if the name ends in .zst; - is
    /// standard output
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Record for so many seconds
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = seconds)]
    pub seconds: Option<Duration>,
    /// Record while this command runs
    #[arg(value_name = "COMMAND", last = true, value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
    /// Buffer for each processor; what does not fit is lost
    #[arg(long, allow_negative_numbers = true, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub buffer: u32,
    /// Where tracefs is mounted
    #[arg(long, value_name = "DIR", default_value = "/sys/kernel/tracing", value_hint = ValueHint::DirPath)]
    pub tracefs: PathBuf,
}

/// Arguments of `trace anonymise`.
#[derive(Debug, Args)]
pub(crate) struct AnonymiseArgs {
    /// The trace: a file, for it is read twice
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub trace: PathBuf,
    /// Where the result goes; compressed if the name ends in .zst; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Order in which memory is laid out anew; keep it secret [default: from the system's
    /// randomness]
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub seed: Option<u64>,
    /// Keep the time of day instead of beginning at 0
    #[arg(long)]
    pub keep_times: bool,
    /// Leave malformed lines out instead of stopping at the first
    #[arg(long)]
    pub lenient: bool,
    /// Bounds on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,
}

const CONVERT_LONG: &str = "\
Write a trace's operations as Parquet, for tools that read tables.

One row an operation (map, unmap) or mark, in the order of the trace: time, device, processor, the mapping that pairs an unmap with its \
map, direction, class, and the buffer's segments. Devices and the summary stand in the file's metadata. `compare` reads the file like \
any trace, with the same rows. The lines themselves are not kept: `trace info` and `trace anonymise` want the text.

Needs a build with `--features parquet`.";

/// Arguments of `trace convert`.
#[derive(Debug, Args)]
#[command(long_about = CONVERT_LONG)]
pub(crate) struct ConvertArgs {
    /// The trace; - is standard input
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub trace: PathBuf,
    /// The Parquet file, whose name ends in .parquet; - is standard output
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Leave malformed lines out instead of stopping at the first
    #[arg(long)]
    pub lenient: bool,
    /// Bounds on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,
}

const CALIBRATE_LONG: &str = "\
Measure this machine and write a cost profile for `compare --profile`.

What a user program can execute is measured: the cycle counter's rate and cost, storing a table entry, writing a line back and waiting \
for it. What it cannot execute, the invalidation of the IOTLB, a miss, a packet without protection, is taken from r210-2015; the file \
says of every number which it is. Edit it where you know better.";

/// Arguments of `calibrate`.
#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// Where the profile goes [default: standard output]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub out: Option<PathBuf>,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// For which shell
    pub shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Write a page for each subcommand into this directory, instead of one to standard output
    #[arg(value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}

fn named_mode(name: &str) -> Result<Mode, LabError> {
    Mode::find(name).ok_or_else(|| LabError::NoSuchMode(name.to_owned()))
}

/// A mode whose IOTLB caches pages.
fn paged_mode(name: &str) -> Result<Mode, String> {
    let mode = named_mode(name).map_err(|error| error.to_string())?;
    if mode.has_rings() || !mode.translates() {
        return Err("it looks up no pages".into());
    }
    Ok(mode)
}

fn experiment(id: &str) -> Result<&'static Experiment, String> {
    Experiment::find(id).ok_or_else(|| {
        let known: Vec<&str> = Experiment::ALL
            .iter()
            .map(|experiment| experiment.id)
            .collect();
        format!("there are {}", known.join(", "))
    })
}

fn kind(name: &str) -> Result<Kind, String> {
    let known = || Kind::ALL.map(Kind::word).join(", ");
    Kind::called(name).ok_or_else(|| format!("there are {}", known()))
}

fn configuration(name: &str) -> Result<Configuration, String> {
    let known = || Configuration::ALL.map(Configuration::name).join(", ");
    Configuration::called(name).ok_or_else(|| format!("there are {}", known()))
}

fn conditions(text: &str) -> Result<Vec<Condition>, ConditionError> {
    Condition::parse_all(text)
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("it has to be a number above 0".into()),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    let text = text.strip_suffix('%').unwrap_or(text);
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("it has to be a number of per cent".into()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 1e6 => Ok(Duration::from_secs_f64(value)),
        _ => Err("it has to be a number of seconds, above 0".into()),
    }
}

fn repetitions(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(number) if number <= 10_000 => Ok(number),
        _ => Err("it has to be a number from 0 to 10000".into()),
    }
}

/// Seconds as nanoseconds.
fn cycle_ns(text: &str) -> Result<u64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (1e-6..=1e6).contains(&seconds) => Ok((seconds * 1e9) as u64),
        _ => Err("a cycle lasts 0.000001 to 1000000 seconds".into()),
    }
}

fn cycles(text: &str) -> Result<Cycles, String> {
    let cycles = text.parse::<u8>().ok().and_then(Cycles::new);
    cycles.ok_or_else(|| format!("C is 1 to {}", Cycles::MAX))
}

fn ring_entries(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(slots) if (1..1 << 18).contains(&slots) => Ok(slots),
        _ => Err("a ring has 1 to 262143 slots".into()),
    }
}

fn iotlb(text: &str) -> Result<(u32, u32), String> {
    let wrong = || "it has to be SETSxWAYS, as in 16x4".to_owned();
    let (sets, ways) = text.split_once('x').ok_or_else(wrong)?;
    match (sets.parse::<u32>(), ways.parse::<u32>()) {
        (Ok(sets), Ok(ways)) => Ok((sets, ways)),
        _ => Err(wrong()),
    }
}

fn walk_cache(text: &str) -> Result<[u32; 3], String> {
    let wrong = || "it has to be three numbers of entries, as in 32,16,4".to_owned();
    let parts: Vec<u32> = text
        .split(',')
        .map(|part| part.trim().parse::<u32>().ok())
        .collect::<Option<_>>()
        .ok_or_else(wrong)?;
    parts.try_into().map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn rings_have_the_sizes_that_an_address_can_name() {
        assert_eq!(ring_entries("1"), Ok(1));
        assert_eq!(ring_entries("262143"), Ok(262_143));
        for wrong in ["0", "262144", "-1", "", "4096.0", "99999999999"] {
            assert!(ring_entries(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn cycles_have_a_length_and_a_number() {
        assert_eq!(cycle_ns("0.5"), Ok(500_000_000));
        assert_eq!(cycles("254").map(Cycles::get), Ok(254));
        for wrong in ["0", "-1", "nan", "inf", "1e9", ""] {
            assert!(cycle_ns(wrong).is_err(), "{wrong}");
        }
        for wrong in ["0", "255", "-1", "1.5"] {
            assert!(cycles(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn geometry_is_read() {
        assert_eq!(iotlb("16x4"), Ok((16, 4)));
        for wrong in ["", "16", "-1x4", "16x4x1", "x", "16x99999999999"] {
            assert!(iotlb(wrong).is_err(), "{wrong}");
        }
        assert_eq!(walk_cache("32,16,4"), Ok([32, 16, 4]));
        for wrong in ["", "1,2", "1,2,3,4", "a,b,c", "1,2,99999999999"] {
            assert!(walk_cache(wrong).is_err(), "{wrong}");
        }
    }
}
