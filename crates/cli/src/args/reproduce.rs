//! Arguments of `reproduce`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueHint};
use ringfence_experiments::Experiment;
use ringfence_experiments::guest_loads::{Load, Protection};
use ringfence_experiments::guests::{Configuration, Kind};

use super::values::{configuration, experiment, kind, load, protection};

pub(super) const REPRODUCE_LONG: &str = "\
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
  ringfence reproduce X21 --guest-kind emulated --guest-configuration pviommu+rtc,virtio-strict
  ringfence reproduce X29 --load-kernel 6.12 --load-iommu none,riommu-strict --load read-4k";

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
    /// Options of the guests of X29.
    #[command(flatten)]
    pub loads: ReproduceLoadArgs,
}

/// Selection of the guests of X29, which also has the options of the guests of X21 that are no
/// selection.
#[derive(Debug, Args)]
#[command(next_help_heading = "Guests of X29")]
pub(crate) struct ReproduceLoadArgs {
    /// Kernels, in the form of `guest run --kernel`
    #[arg(
        long,
        value_name = "VERSION",
        value_delimiter = ',',
        default_values = ["6.12", "7.2"],
    )]
    pub load_kernel: Vec<String>,
    /// Only these IOMMUs, such as riommu-strict,intel-lazy
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = protection)]
    pub load_iommu: Vec<&'static Protection>,
    /// Only these loads: read-4k, read-128k, stream, round-trip, nvme-read-4k, nvme-read-128k
    #[arg(long, value_name = "LOAD", value_delimiter = ',', value_parser = load)]
    pub load: Vec<Load>,
}

/// Options of the guests of X21 and X29. With --all they boot only if their components are in the
/// cache.
#[derive(Debug, Args)]
#[command(next_help_heading = "Guests of X21 and X29")]
pub(crate) struct ReproduceGuestArgs {
    /// Directory for components fetched for guests
    #[arg(
        long,
        value_name = "DIR",
        default_value = "target/guest",
        value_hint = ValueHint::DirPath,
    )]
    pub guest_cache: PathBuf,
    /// Kernel of the guests of X21, in the form of `guest run --kernel`
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
    /// X21 only: these kinds of device: assigned, emulated, simulated, many-queues
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_parser = kind)]
    pub guest_kind: Vec<Kind>,
    /// X21 only: these configurations: kvm-baseline, pviommu, rtc-paper, pviommu+rtc,
    /// pviommu+rtc+hopt, virtio-strict, virtio-lazy
    #[arg(long, value_name = "CONFIGURATION", value_delimiter = ',', value_parser = configuration)]
    pub guest_configuration: Vec<Configuration>,
    /// Directory of the modules' sources
    #[arg(long, value_name = "DIR", default_value = "kmod", value_hint = ValueHint::DirPath)]
    pub module_source: PathBuf,
}
