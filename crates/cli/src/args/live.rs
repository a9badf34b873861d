//! The command line of what serves guests.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

pub(crate) const SERVE_LONG: &str = "\
Serve virtio devices to a QEMU, every DMA of theirs behind a virtio-iommu.

Each device listens on a socket of its own in the directory, for QEMU's vfio-user-pci (10.1 or later). The arguments that QEMU needs \
are printed; the kernel, its user space and a console are yours to add. The guest's kernel needs virtio-iommu and VIOT (Debian's since \
6.12). Counters in Prometheus's text format can be read from metrics.sock.

Ends with Ctrl-C.";

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Directory of the sockets; made if it does not exist
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// The devices.
    #[command(flatten)]
    pub devices: DeviceArgs,
}

/// Which devices there are.
#[derive(Debug, Args)]
pub(crate) struct DeviceArgs {
    /// A disk over this raw file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Devices")]
    pub blk: Option<PathBuf>,
    /// The disk cannot be written
    #[arg(long, help_heading = "Devices")]
    pub read_only: bool,
    /// An entropy device
    #[arg(long, help_heading = "Devices")]
    pub rng: bool,
    /// The disk misbehaves: after its first request it writes eight bytes at this address, to see what stops it
    #[arg(long, value_name = "ADDRESS", value_parser = address, help_heading = "Devices")]
    pub stray_write: Option<u64>,
    /// No virtio-iommu: devices see all of the guest's memory
    #[arg(long, help_heading = "Devices")]
    pub no_iommu: bool,
    /// Memory of the guest in MiB
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=16384), help_heading = "Devices")]
    pub memory: u32,
    /// Processors of the guest
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16), help_heading = "Devices")]
    pub cpus: u32,
}

/// What to do with guests.
#[derive(Debug, Subcommand)]
pub(crate) enum GuestCommand {
    /// Boot a guest, run a command in it, end with the command's exit code
    #[command(long_about = GUEST_RUN_LONG, after_help = GUEST_RUN_EXAMPLES)]
    Run(GuestRunArgs),
}

const GUEST_RUN_LONG: &str = "\
Boot a guest, run a command in it, end with the command's exit code.

The guest is Debian's kernel as it is, with busybox as its user space. Its disk lives in this process, behind a virtio-iommu that lives \
here too: no byte of the guest's memory is reached that the guest has not mapped for the disk. Standard input and output are the \
command's. What is missing (QEMU 10.1 or later, the kernel) is fetched from Debian's archive into the cache, without root; busybox-static \
and xz-utils have to be installed.";

const GUEST_RUN_EXAMPLES: &str = "\
Examples:
  ringfence guest run -- sh -c 'dd if=/dev/vda of=/dev/null bs=4k count=1000 iflag=direct'
  ringfence guest run --kernel 7.3 --lazy --metrics -- md5sum /dev/vda
  ringfence guest run                                 a shell

Exit codes: the command's; 1 also if the guest could not be booted or ended without one.";

/// Arguments of `guest run`.
#[derive(Debug, Args)]
pub(crate) struct GuestRunArgs {
    /// Debian kernel, by the beginning of its version
    #[arg(long, value_name = "VERSION", default_value = "6.12")]
    pub kernel: String,
    /// Unmapped pages are out of reach when the kernel's unmap returns; the default
    #[arg(long, conflicts_with = "lazy")]
    pub strict: bool,
    /// Unmaps gather and take effect together, as by default in Linux
    #[arg(long)]
    pub lazy: bool,
    /// More words for the kernel's command line
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    pub append: String,
    /// Longest life of the guest in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub limit: u64,
    /// Where what was fetched is kept
    #[arg(long, value_name = "DIR", default_value = "target/guest", value_hint = ValueHint::DirPath)]
    pub cache: PathBuf,
    /// Keep sockets, tables and the console here [default: a temporary directory, kept only if the guest fails]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Print the devices' counters to standard error at the end
    #[arg(long)]
    pub metrics: bool,
    /// The devices; without --blk the disk is an empty one of 64 MiB.
    #[command(flatten)]
    pub devices: DeviceArgs,
    /// The command [default: a shell]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

fn address(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u64::from_str_radix(digits, 16).map_err(|_| "it has to be a hexadecimal address".into())
}
