//! The command line.

mod attack;
mod disk;
mod guest;
mod limits;
mod live;
mod trace;
mod values;

pub(crate) use attack::AttackArgs;
pub(crate) use disk::{DiskArg, DiskModeArg, IommuKind};
pub(crate) use guest::GuestCommand;
pub(crate) use guest::{
    GuestArgs, GuestBenchReadArgs, GuestPrepareArgs, GuestRunArgs, GuestVerifyQemuArgs, ModuleArgs,
};
pub(crate) use limits::{ReplayLimitArgs, TraceLimitArgs};
pub(crate) use live::{DeviceArgs, GuestLimitArgs};
pub(crate) use live::{ServeArgs, TopArgs};
pub(crate) use trace::{
    AnonymiseArgs, ConvertArgs, InfoArgs, MAX_BUFFER_MIB, RecordArgs, TraceCommand, VerifyArgs,
};

use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use ringfence_experiments::Experiment;
use ringfence_experiments::guests::{Configuration, Kind};
use ringfence_lab::Operation;
use ringfence_lab::compose::compose;
use ringfence_lab::modes::Mode;
use ringfence_lab::rtc::Cycles;
use ringfence_report::Condition;

use values::{
    conditions, configuration, cycle_ns, cycles, experiment, iotlb, kind, named_mode, operation,
    paged_mode, percent, positive, repetitions, ring_entries, walk_cache,
};

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 error, 2 wrong usage or a condition on a field that was not measured, 3 a \
condition of --fail-if or --max-regression holds, 130 ended by a signal (unfinished files are \
removed).";

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
    #[command(long_about = COMPARE_LONG)]
    Compare(Box<CompareArgs>),
    /// Execute attack classes on protection modes under the oracle; print which succeed
    #[command(long_about = attack::ATTACK_LONG)]
    Attack(AttackArgs),
    /// Compute the sizes of rings and of the IOTLB that a trace needs
    #[command(long_about = SIZE_LONG)]
    Size(SizeArgs),
    /// Print the modes: the choice on each of four axes, the promised safety and its bound
    Modes(ModesArgs),
    /// Compare two reports of `compare --json`
    Diff(DiffArgs),
    /// Run the experiments of the rIOMMU, EIOVAR, Fujita and PVIOMMU papers; print their numbers
    /// next to the numbers measured here
    #[command(long_about = REPRODUCE_LONG)]
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

const COMPARE_LONG: &str = "\
Replay traces through protection modes; print what each costs and what it exposes.

Each mode replays each trace twice under an oracle, which knows the bytes that each device may \
access: once with a device that accesses its buffers (the metered pass), once with an attacker \
that accesses every buffer after its unmap (the attack pass). A third, timed replay measures the \
mapping layer alone. Cycles are measured on this CPU. No user program can execute an IOTLB \
invalidation; the cost profile models its cycles, and the report shows their share.

relative_throughput = c / (c + map + unmap): a packet costs c cycles without protection and \
c + map + unmap with it. c comes from the profile (908 for r210-2015: half of a packet with two \
mappings) or from --baseline-cycles. --operation selects the c of a block request or of a page. A \
profile may also describe the device's side, where throughput ends at page walks; then \
relative_throughput is the smaller of the two, and the report says which.

The profiles are r210-2015, cascade-lake-2024, ice-lake-2024, grace-2025, graviton4-2026, \
epyc-2023 and ryzen-2021. A number that no source states is unknown, and so is what needs it. \
docs/PROFILES.md lists the numbers with their sources.

An invalidation at every unmap limits a mode to c / (c + invalidation), 0.30 under r210-2015. \
fence comes closest to this limit. fence-burst exceeds it: it invalidates once for a burst of \
unmaps, and withholds the buffers until then. It is as strict as fence.

By default, compare replays the modes that a user can select today, and riommu, for which no \
hardware exists. --all-modes replays all modes, --modes a selection.";

const COMPARE_EXAMPLES: &str = "\
Examples:
  ringfence compare                                   the bundled sample, 12 modes
  ringfence compare --all-modes                       the bundled sample, all modes
  ringfence compare trace.txt.zst                     a recording of tracefs, trace-cmd or perf
  zcat trace.gz | ringfence compare -                 from standard input
  ringfence compare a.zst b.zst --json > now.json     for programs; see docs/JSON.md
  ringfence compare --modes linux-strict,linux-lazy,fence,fence-burst --plot plots
  ringfence compare --mode alloc=eiovar-64,table=cached-radix,flush=burst
  ringfence compare --mode alloc=table-bitmap,table=flat,flush=per-wrap
  ringfence compare --iotlb 64x8 --coherent --baseline-cycles 2500
  ringfence compare --fail-if 'fence:violations>0,false_faults>0'

Exit code 2 reports a condition on a field that was not measured (cycles with --repeat 0, \
violations with --no-attack), or on a trace without a map.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 a condition of --fail-if holds.";

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(after_help = COMPARE_EXAMPLES)]
pub(crate) struct CompareArgs {
    /// Traces: text of tracefs, trace-cmd or perf, plain or zstd, or trace-cmd's .dat; - is
    /// standard input [default: a bundled sample]
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub traces: Vec<PathBuf>,

    /// Names of modes, in the order of the report [default: 12 that can be used today, with riommu]
    #[arg(
        long,
        value_name = "MODE,...",
        value_delimiter = ',',
        value_parser = named_mode,
        help_heading = "Modes",
    )]
    pub modes: Vec<Mode>,

    /// Replay all modes that `ringfence modes` lists
    #[arg(long, conflicts_with = "modes", help_heading = "Modes")]
    pub all_modes: bool,

    /// An additional composed mode; `ringfence modes` lists the choices. May be repeated
    #[arg(
        long = "mode",
        value_name = "alloc=A,table=T,flush=F[,owner=O]",
        value_parser = |mode: &str| compose(mode),
        help_heading = "Modes",
    )]
    pub composed: Vec<Mode>,

    /// Replay only devices of this name. May be repeated
    #[arg(long = "device", value_name = "NAME", help_heading = "Replay")]
    pub devices: Vec<String>,

    /// Count malformed lines instead of stopping at the first
    #[arg(long, help_heading = "Replay")]
    pub lenient: bool,

    /// Replay without the attacker; makes no claim about safety
    #[arg(long, help_heading = "Replay")]
    pub no_attack: bool,

    /// Timed repetitions; 0 measures no cycles [default: 3, more for short traces]
    #[arg(long, value_name = "N", value_parser = repetitions, help_heading = "Replay")]
    pub repeat: Option<usize>,

    /// Cost profile: a name, or a file that `ringfence calibrate` wrote
    #[arg(
        long,
        value_name = "NAME|FILE",
        default_value = "r210-2015",
        help_heading = "Platform"
    )]
    pub profile: String,

    /// The operation whose cost without protection is c: packet, block-request or page
    #[arg(
        long,
        value_name = "OPERATION",
        default_value = "packet",
        value_parser = operation,
        help_heading = "Platform"
    )]
    pub operation: Operation,

    /// c: cycles without protection, per mapping, or per page with --operation page [default: from
    /// the profile]
    #[arg(long, value_name = "CYCLES", value_parser = positive, help_heading = "Platform")]
    pub baseline_cycles: Option<f64>,

    /// Cycles of an invalidation [default: from the profile]
    #[arg(long, value_name = "CYCLES", help_heading = "Platform")]
    pub invalidation_cycles: Option<u64>,

    /// Parallel page walkers of the second ceiling of the device's side
    #[arg(
        long,
        value_name = "K",
        default_value_t = 4,
        value_parser = clap::value_parser!(u32).range(1..=1024),
        help_heading = "Platform"
    )]
    pub walkers: u32,

    /// Geometry of the IOTLB [default: from the profile]
    #[arg(long, value_name = "SETSxWAYS", value_parser = iotlb, help_heading = "Platform")]
    pub iotlb: Option<(u32, u32)>,

    /// Entries of the page-walk caches of levels 1, 2 and 3 [default: from the profile]
    #[arg(long, value_name = "A,B,C", value_parser = walk_cache, help_heading = "Platform")]
    pub walk_cache: Option<[u32; 3]>,

    /// The page walker snoops the CPU caches [default: from the profile]
    #[arg(long, conflicts_with = "non_coherent", help_heading = "Platform")]
    pub coherent: bool,

    /// The page walker does not snoop the CPU caches: every modified line is written back
    #[arg(long, help_heading = "Platform")]
    pub non_coherent: bool,

    /// Slots of every ring in the modes with rings [default: twice the slots mapped at once,
    /// counted before the replay]
    #[arg(long, value_name = "N", value_parser = ring_entries, help_heading = "Platform")]
    pub ring_entries: Option<u32>,

    /// Length of a cycle, T, in modes with a reverse translation cache
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "10",
        value_parser = cycle_ns,
        help_heading = "Replay",
    )]
    pub rtc_period: u64,

    /// Number of whole cycles, C, for which a reverse translation cache keeps unused mappings
    #[arg(
        long,
        value_name = "C",
        default_value = "3",
        value_parser = cycles,
        help_heading = "Replay",
    )]
    pub rtc_periods_kept: Cycles,

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

    // The brackets belong to the help text and are not a link.
    #[allow(rustdoc::broken_intra_doc_links)]
    /// Exit with code 3 if this holds for a row: [MODE:]FIELD OP NUMBER, several joined by commas.
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

const REPRODUCE_LONG: &str = "\
Run the experiments of the rIOMMU, EIOVAR, Fujita and PVIOMMU papers; print their numbers next to \
the numbers measured here.

Each row has the published number, the number found here, and their ratio. A cost has two parts: \
cycles measured on this CPU, and cycles modelled by the profile r210-2015 (invalidations, IOTLB \
misses, and a packet without protection). The verdict depends on the rows alone. reproduced: no \
order is reversed and every number is within 15%. ordering only: the orders are the paper's, a \
number differs by more. undecided: every number is within 15%, none of the paper's orders is \
decided. numbers off: a number differs by more, no order is decided. differs: an order is reversed \
or an exact number differs. docs/REPRODUCE.md explains how to read the rest.";

const REPRODUCE_EXAMPLES: &str = "\
Examples:
  ringfence reproduce --list
  ringfence reproduce X10 X13
  ringfence reproduce --all --out findings            pages, JSON and text in one directory
  ringfence reproduce --all --json > findings.json
  ringfence reproduce X07 --trace traces/*.zst        recorded devices and synthetic rings
  ringfence reproduce X21                             boots guests; fetches what they need (see \
  guest run)
  ringfence reproduce X21 --guest-kind emulated --guest-configuration pviommu+rtc,virtio-strict";

/// Arguments of `reproduce`.
#[derive(Debug, Args)]
#[command(
    after_help = REPRODUCE_EXAMPLES,
    group = ArgGroup::new("which").required(true).multiple(false).args(["ids", "all", "list"]),
)]
pub(crate) struct ReproduceArgs {
    /// Ids of experiments
    #[arg(value_name = "ID", value_parser = experiment)]
    pub ids: Vec<&'static Experiment>,
    /// Run all experiments
    #[arg(long)]
    pub all: bool,
    /// List the experiments and run nothing
    #[arg(long)]
    pub list: bool,
    /// Recorded traces for X07, which also feeds their devices to the prefetchers, and for X22,
    /// which counts how often they map their pages again
    #[arg(
        long = "trace",
        value_name = "FILE",
        num_args = 1..,
        conflicts_with = "list",
        value_hint = ValueHint::FilePath,
    )]
    pub traces: Vec<PathBuf>,
    /// Also write an HTML page, JSON, text, and a Markdown page per experiment into this directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub out: Option<PathBuf>,
    /// Print one JSON object (docs/JSON.md)
    #[arg(long)]
    pub json: bool,
    /// Options of the guests.
    #[command(flatten)]
    pub guests: ReproduceGuestArgs,
}

/// Options of the guests of X21. With --all they boot only if their components are in the cache.
#[derive(Debug, Args)]
#[command(next_help_heading = "Guests of X21")]
pub(crate) struct ReproduceGuestArgs {
    /// Directory for components fetched for guests
    #[arg(
        long,
        value_name = "DIR",
        default_value = "target/guest",
        value_hint = ValueHint::DirPath,
    )]
    pub guest_cache: PathBuf,
    /// Kernel of the guests, in the form of `guest run --kernel`
    #[arg(long, value_name = "VERSION", default_value = "6.12")]
    pub guest_kernel: String,
    /// Maximum run time of each guest in seconds
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..=86400),
    )]
    pub guest_timeout: u64,
    /// Only these kinds of device: assigned, emulated, simulated, many-queues
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_parser = kind)]
    pub guest_kind: Vec<Kind>,
    /// Only these configurations: kvm-baseline, pviommu, rtc-paper, pviommu+rtc,
    /// pviommu+rtc+hopt, virtio-strict, virtio-lazy
    #[arg(long, value_name = "CONFIGURATION", value_delimiter = ',', value_parser = configuration)]
    pub guest_configuration: Vec<Configuration>,
    /// Directory of the modules' sources
    #[arg(long, value_name = "DIR", default_value = "kmod", value_hint = ValueHint::DirPath)]
    pub module_source: PathBuf,
}

const CALIBRATE_LONG: &str = "\
Measure this machine and write a cost profile for `compare --profile`.

The command measures what a user program can execute: reading the cycle counter, storing a table \
entry, writing back a line and waiting for it. An IOTLB invalidation, an IOTLB miss and a packet \
without protection come from r210-2015. The file states the origin of every number; edit the \
numbers that you know.

--host measures the invalidation with the function profiler of Linux, as root. It times the \
functions that map, unmap and invalidate while the machine performs I/O for --seconds: start the \
I/O first. The kernel needs CONFIG_FUNCTION_PROFILER. The profile contains only what was measured.";

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
