//! The command line of `guest`.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum, ValueHint};

use super::disk::IommuKind;
use super::live::DeviceArgs;

/// Subcommands of `guest`.
#[derive(Debug, Subcommand)]
pub(crate) enum GuestCommand {
    /// Boot a guest, run a command in it, and exit with the command's exit code
    #[command(long_about = GUEST_RUN_LONG, after_help = GUEST_RUN_EXAMPLES)]
    Run(Box<GuestRunArgs>),
    /// Fetch and build the components of a guest, and print their paths
    #[command(long_about = GUEST_PREPARE_LONG, after_help = GUEST_PREPARE_EXAMPLES)]
    Prepare(GuestPrepareArgs),
    /// Inside a guest: time direct reads
    #[command(long_about = GUEST_BENCH_READ_LONG)]
    BenchRead(GuestBenchReadArgs),
    /// Inside a guest: time datagrams, as a stream or as round trips
    #[command(long_about = GUEST_BENCH_NET_LONG)]
    BenchNet(GuestBenchNetArgs),
    /// Compare the software IOMMU with QEMU's own, over the mappings of a stock Linux guest
    #[command(long_about = GUEST_VERIFY_QEMU_LONG)]
    VerifyQemu(GuestVerifyQemuArgs),
}

const GUEST_BENCH_READ_LONG: &str = "\
Inside a guest: time direct reads.

In a guest booted with --icount, a nanosecond is an instruction. The command reports the CPU's \
work per read without the wait for the disk; an idle thread measures the wait. Reads that \
completed before the wait began take less work and are reported separately:

  ringfence guest run --icount --with-ringfence -- ringfence guest bench-read /dev/vda";

/// Arguments of `guest bench-read`.
#[derive(Debug, Args)]
pub(crate) struct GuestBenchReadArgs {
    /// File or block device to read; it needs the bytes of 64 more reads than --count
    pub file: PathBuf,
    /// Number of reads, one after the other from the beginning of the file
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..=10_000),
    )]
    pub count: u32,
    /// Bytes of a read
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = 4096,
        value_parser = clap::value_parser!(u32).range(512..=1 << 20),
    )]
    pub bytes: u32,
    /// Before each read, read this many bytes, which are not timed
    #[arg(
        long,
        value_name = "BYTES",
        value_parser = clap::value_parser!(u32).range(512..=1 << 20),
    )]
    pub after: Option<u32>,
}

const GUEST_BENCH_NET_LONG: &str = "\
Inside a guest: time datagrams, as a stream or as round trips.

The method is that of `guest bench-read`. stream sends datagrams of 1472 bytes to port 9 of the \
peer, and reports the CPU's work of all. round-trips sends datagrams of one byte to port 7, each \
after the answer to the one before, and reports the work of one. Both use 16 flows. --pairs sets \
the number of the interface's queue pairs, which Linux limits to the number of CPUs by default.";

/// Datagrams of `guest bench-net`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Datagrams {
    /// As many as fit
    Stream,
    /// One after the other
    RoundTrips,
}

/// Arguments of `guest bench-net`.
#[derive(Debug, Args)]
pub(crate) struct GuestBenchNetArgs {
    /// Datagrams to send
    #[arg(value_enum)]
    pub datagrams: Datagrams,
    /// Address of the peer
    pub peer: Ipv4Addr,
    /// Number of datagrams
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000),
    )]
    pub count: u32,
    /// Set the number of queue pairs of this interface before
    #[arg(long, value_name = "NAME", requires = "pairs")]
    pub interface: Option<String>,
    /// Number of queue pairs
    #[arg(
        long,
        value_name = "N",
        requires = "interface",
        value_parser = clap::value_parser!(u32).range(1..=8),
    )]
    pub pairs: Option<u32>,
}

const GUEST_VERIFY_QEMU_LONG: &str = "\
Compare the software IOMMU with QEMU's own, over the mappings of a stock Linux guest.

Boots a guest behind QEMU's intel-iommu with a disk of this process. QEMU sends the guest's \
mappings, which go into the software IOMMU. While the guest is stopped, random legal and illegal \
accesses go through both: both must permit an access, to the same bytes, or both must reject it. \
QEMU sends a write-only mapping as one for reads and writes; reads that it then rejects are \
counted separately.

The exit code is 0 if --cases accesses were tried and none differs. By default the guest reads and \
writes its disk; a COMMAND replaces that workload.";

/// Arguments of `guest verify-qemu`.
#[derive(Debug, Args)]
pub(crate) struct GuestVerifyQemuArgs {
    /// Options of the guest.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Number of accesses to try
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2000,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000),
    )]
    pub cases: u32,
    /// Seed of the random accesses
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,
    /// Maximum run time of the guest in seconds
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..=86400),
    )]
    pub timeout: u64,
}

const GUEST_PREPARE_LONG: &str = "\
Fetch and build the components of a guest, and print their paths.

Use it for your own QEMU with the devices of `ringfence serve`. It prints shell assignments: QEMU \
(the program and its first arguments), KERNEL (the image), APPEND (the kernel command line) and \
INITRAMFS. The user space runs a command as in `guest run`: its input and output are the second \
serial line, its exit code goes to the third.";

const GUEST_PREPARE_EXAMPLES: &str = "\
Examples:
  ringfence serve --dir RUN --disk disk.img >arguments &
  eval \"$(ringfence guest prepare -- md5sum /dev/vda)\"
  eval \"$QEMU $(cat arguments)\" -display none -kernel '$KERNEL' -initrd '$INITRAMFS' -append \
  '\"$APPEND\"' \\
    -serial file:console -serial stdio -serial file:status";

/// Options of the guest.
#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// Debian kernel: the beginning of its version; `latest`, the newest one at the time of the
    /// fetch; `debug`, which `cargo xtask guest --debug-kernel` builds; or the path of a directory
    /// with unpacked packages
    #[arg(long, value_name = "VERSION", default_value = "6.12")]
    pub kernel: String,
    /// Invalidate at each unmap, so that devices cannot reach a page after the kernel's unmap
    /// returns; the default
    #[arg(long, conflicts_with = "lazy")]
    pub strict: bool,
    /// Batch unmaps and invalidate them together, as Linux does by default
    #[arg(long)]
    pub lazy: bool,
    /// Additional words for the kernel's command line
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    pub append: String,
    /// Directory for fetched components
    #[arg(
        long,
        value_name = "DIR",
        default_value = "target/guest",
        value_hint = ValueHint::DirPath,
    )]
    pub cache: PathBuf,
    /// Command to run [default: a shell]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Parses the name of a module, which is part of file names.
fn module_name(text: &str) -> Result<String, &'static str> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    match !text.is_empty() && text.chars().all(is_name) {
        true => Ok(text.to_owned()),
        false => Err("expected lower-case letters, digits and underscores"),
    }
}

/// Options of this project's modules in the guest.
#[derive(Debug, Args)]
pub(crate) struct ModuleArgs {
    /// Parameters of the module that is loaded, as for insmod: "cache=0 t_ms=1000". Needs --iommu
    /// pviommu, --iommu riommu or --module
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    pub module_args: String,
    /// Drive the IOMMU with the module pviommu-as-published, which has the cache of the PVIOMMU
    /// paper, or riommu-as-published, which has the bursts of the rIOMMU paper: with their defects.
    /// Needs --iommu pviommu or riommu
    #[arg(long)]
    pub as_published: bool,
    /// Load this module before the drivers; --iommu loads riommu and pviommu
    #[arg(long, value_name = "NAME", value_parser = ["pooldma"])]
    pub module: Option<String>,
    /// Load this driver of the kernel's package too, such as nvme; may be repeated
    #[arg(long, value_name = "NAME")]
    pub driver: Vec<String>,
    /// Put this module into the guest, at /modules/NAME.ko, for the command to load
    #[arg(long, value_name = "NAME", value_parser = module_name)]
    pub with_module: Option<String>,
    /// Directory of the modules' sources
    #[arg(long, value_name = "DIR", default_value = "kmod", value_hint = ValueHint::DirPath)]
    pub module_source: PathBuf,
}

/// Arguments of `guest prepare`.
#[derive(Debug, Args)]
pub(crate) struct GuestPrepareArgs {
    /// Options of the guest.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// IOMMU that `serve --iommu` serves. The user space loads its driver; for pviommu, this is
    /// the module pviommu, built for the kernel
    #[arg(long, value_name = "KIND", value_enum, default_value_t)]
    pub iommu: IommuKind,
    /// Options of the modules.
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Put this program into the guest
    #[arg(long)]
    pub with_ringfence: bool,
    /// Output file for the user space
    #[arg(
        long,
        value_name = "FILE",
        default_value = "initramfs.cpio",
        value_hint = ValueHint::FilePath,
    )]
    pub initramfs: PathBuf,
}

const GUEST_RUN_LONG: &str = "\
Boot a guest, run a command in it, and exit with the command's exit code.

The guest is an unmodified Debian kernel with busybox as its user space. This process serves its \
disk behind a virtio-iommu: the disk can access only guest memory that the guest has mapped for \
it. Standard input and output are those of the command. Missing components (QEMU 10.1 or later, \
the kernel) are fetched from Debian's archive into the cache, without root. Install busybox-static \
and xz-utils yourself.";

const GUEST_RUN_EXAMPLES: &str = "\
Examples:
  ringfence guest run -- sh -c 'dd if=/dev/vda of=/dev/null bs=4k count=1000 iflag=direct'
  ringfence guest run --kernel latest --lazy --metrics -- md5sum /dev/vda
  ringfence guest run --iommu pviommu -- sh -c 'md5sum /dev/vda; grep -r . \
  /sys/kernel/debug/pviommu'
  ringfence guest run                                 a shell

Exit codes: the command's; 1 also if the guest did not boot, or ended without an exit code.";

/// Arguments of `guest run`.
#[derive(Debug, Args)]
pub(crate) struct GuestRunArgs {
    /// Options of the guest.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Options of the modules.
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Maximum run time of the guest in seconds
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..=86400),
    )]
    pub timeout: u64,
    /// Directory for sockets, tables and the console [default: a temporary directory, kept only if
    /// the guest fails]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Count time in instructions, a nanosecond each, and answer doorbells before the guest
    /// continues
    #[arg(long)]
    pub icount: bool,
    /// Further arguments of QEMU, separated by white space, for devices of its own; its IOMMU
    /// translates for them
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    pub qemu_args: String,
    /// Put this program into the guest
    #[arg(long)]
    pub with_ringfence: bool,
    /// Print the devices' counters to standard error at the end
    #[arg(long)]
    pub metrics: bool,
    /// Fail if the guest's kernel reports a defect: an oops, a warning, or a finding of lockdep,
    /// KASAN, UBSAN or the DMA API's checks
    #[arg(long)]
    pub check_kernel_log: bool,
    /// Options of the devices; without a FILE the disk is an empty one of 64 MiB.
    #[command(flatten)]
    pub devices: DeviceArgs,
}
