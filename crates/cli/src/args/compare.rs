//! Arguments of `compare`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use ringfence_lab::compose::compose;
use ringfence_lab::layer::{INSPECTED_BYTES, LARGEST_BUFFER};
use ringfence_lab::mapping_cache::Cycles;
use ringfence_lab::modes::Mode;
use ringfence_lab::{IommuFamily, IotlbPrefetch, Operation};
use ringfence_report::Condition;
use ringfence_types::PageSize;

use super::values::{
    conditions, cycle_ns, cycles, gbps, iommu, iotlb, named_mode, operation, page_size, positive,
    prefetch, repetitions, ring_entries, walk_cache,
};
use super::{Format, ReplayLimitArgs, TraceLimitArgs};

pub(super) const COMPARE_LONG: &str = "\
Replay traces through protection modes; print what each costs and what it exposes.

The program replays each trace twice in each mode, under an oracle that knows the bytes that each \
device may access: once with a device that accesses its buffers (the metered pass), once with an \
attacker that accesses every buffer after its unmap (the attack pass). A third, timed replay \
measures the mapping layer alone. Cycles are measured on this CPU. No user program can execute an \
IOTLB invalidation; the cost profile models its cycles, and the report shows their share.

relative_throughput = c / (c + map + unmap): a packet costs c cycles without protection and \
c + map + unmap with it. c comes from the profile (908 for r210-2015: half of a packet with two \
mappings) or from --baseline-cycles. --operation selects the c of a block request or of a page. A \
profile may also describe the device's side, where throughput ends at page walks; then \
relative_throughput is the smaller of the two, and the report says which.

The profiles are r210-2015, cascade-lake-2024, ice-lake-2024, ice-lake-2025, grace-2025, \
graviton4-2026, epyc-2023 and ryzen-2021. A number that no source states is unknown, and so is \
what needs it. docs/PROFILES.md lists the numbers with their sources.

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
  ringfence compare --profile cascade-lake-2024 --line-rate 100,200,400,800
  ringfence compare --profile cascade-lake-2024 --page-size 64k --frames contiguous
  ringfence compare --profile cascade-lake-2024 --prefetch 3
  ringfence compare --iommu smmuv3 --repeat 0
  ringfence compare --iotlb 64x8 --coherent --baseline-cycles 2500
  ringfence compare --fail-if 'fence:violations>0,false_faults>0'

Exit code 2 reports a condition on a field that was not measured (cycles with --repeat 0, \
violations with --no-attack), or on a trace without a map.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 a condition of --fail-if holds.";

/// Frames of the buffers in a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Frames {
    /// Those of the trace.
    Recorded,
    /// Aligned, contiguous frames for buffers of 64 KiB and more.
    Contiguous,
}

/// Traces, modes and platform of a comparison.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
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
    /// [default: r210-2015; with --iommu of another family, one that states nothing]
    #[arg(long, value_name = "NAME|FILE", help_heading = "Platform")]
    pub profile: Option<String>,

    /// Family of the IOMMU that the replays model: vtd, amd, smmuv3 or riscv. The last three have
    /// the modes none, linux-strict, linux-lazy, fence, fence-burst and copy
    /// [default: vtd]
    #[arg(long, value_name = "FAMILY", value_parser = iommu, help_heading = "Platform")]
    pub iommu: Option<IommuFamily>,

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

    /// Page walkers that the device's IOMMU runs in parallel, where a profile has the cycles of a
    /// walk; they limit the throughput
    #[arg(
        long,
        value_name = "K",
        default_value_t = 4,
        value_parser = clap::value_parser!(u32).range(1..=1024),
        help_heading = "Platform"
    )]
    pub walkers: u32,

    /// Line rates for which to report what each mode needs: page walkers, processors for
    /// invalidations, and memory bandwidth for copies
    #[arg(
        long,
        value_name = "GBPS,...",
        value_delimiter = ',',
        value_parser = gbps,
        help_heading = "Platform",
    )]
    pub line_rate: Vec<f64>,

    /// Geometry of the IOTLB [default: from the profile]
    #[arg(long, value_name = "SETSxWAYS", value_parser = iotlb, help_heading = "Platform")]
    pub iotlb: Option<(u32, u32)>,

    /// Entries of the page-walk caches of levels 1, 2 and 3 [default: from the profile]
    #[arg(long, value_name = "A,B,C", value_parser = walk_cache, help_heading = "Platform")]
    pub walk_cache: Option<[u32; 3]>,

    /// Largest page of tables that the kernel fills at each map, used where a mapping covers it and
    /// IOVA and frame are aligned: 4k, 64k (16 entries with a contiguous hint) or 2m
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "4k",
        value_parser = page_size,
        help_heading = "Platform",
    )]
    pub page_size: PageSize,

    /// Frames of the buffers: recorded, or contiguous, which moves buffers of 64 KiB and more to
    /// aligned, contiguous frames
    #[arg(
        long,
        value_enum,
        default_value_t = Frames::Recorded,
        value_name = "FRAMES",
        hide_possible_values = true,
        help_heading = "Replay",
    )]
    pub frames: Frames,

    /// Prefetch into the IOTLB: N for the next N pages at each miss, next-page, previous-page,
    /// hint-at-map, or none [default: from the profile]
    #[arg(
        long,
        value_name = "N|STRATEGY",
        value_parser = prefetch,
        help_heading = "Platform",
    )]
    pub prefetch: Option<IotlbPrefetch>,

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

    /// Length of a period (the paper's cycle, T) in modes with a reverse translation cache
    #[arg(
        long = "rtc-period",
        value_name = "SECONDS",
        default_value = "10",
        value_parser = cycle_ns,
        help_heading = "Replay",
    )]
    pub rtc_period_ns: u64,

    /// Number of whole periods, C, for which a reverse translation cache keeps unused mappings
    #[arg(
        long,
        value_name = "C",
        default_value = "3",
        value_parser = cycles,
        help_heading = "Replay",
    )]
    pub rtc_periods_kept: Cycles,

    /// Bytes of a received buffer that the driver copies to inspect them, in modes whose driver
    /// takes its buffers from a pool
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = INSPECTED_BYTES,
        value_parser = clap::value_parser!(u32).range(..=LARGEST_BUFFER as i64),
        help_heading = "Replay",
    )]
    pub inspected_bytes: u32,

    /// Limits on the trace.
    #[command(flatten)]
    pub limits: TraceLimitArgs,

    /// Limits on the replay.
    #[command(flatten)]
    pub replay_limits: ReplayLimitArgs,
}

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(after_help = COMPARE_EXAMPLES)]
pub(crate) struct CompareArgs {
    /// Traces, modes and platform.
    #[command(flatten)]
    pub replay: ReplayArgs,

    /// Form of the output.
    #[command(flatten)]
    pub format: Format,

    /// Write SVG plots into this directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Output")]
    pub plot: Option<PathBuf>,

    // The brackets belong to the help text and are not a link.
    #[allow(rustdoc::broken_intra_doc_links)]
    /// Exit with code 3 if this holds for a row: [MODE:]FIELD OP NUMBER, several joined by commas.
    /// FIELD is a field of a JSON row (docs/JSON.md)
    #[arg(long, value_name = "CONDITION", value_parser = conditions, help_heading = "Output")]
    // clap takes the path `Vec` for the list of occurrences; the inner one is the value of one.
    pub fail_if: Vec<std::vec::Vec<Condition>>,
}
