//! The command line of what serves guests.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
#[cfg(feature = "live")]
use ringfence_live::dma_fault_injection::InjectedDma;
#[cfg(feature = "live")]
use ringfence_live::virtio::pviommu::InjectedReply;

#[cfg(not(feature = "live"))]
type InjectedDma = String;
#[cfg(not(feature = "live"))]
type InjectedReply = String;

pub(crate) const SERVE_LONG: &str = "\
Serve virtio devices to a QEMU, every DMA of theirs behind a virtio-iommu.

Each device listens on a socket of its own in the directory, for QEMU's vfio-user-pci (10.1 or later). The arguments that QEMU needs \
are printed; the kernel, its user space and a console are yours to add. The guest's kernel needs virtio-iommu and VIOT (Debian's since \
6.12). Counters in Prometheus's text format can be read from metrics.sock.

Another process can take the devices over while the guest runs (--take-over): the guest sees a pause, and nothing else.

Ends with Ctrl-C. Exit codes: 0 done, 1 error, 2 wrong usage, 4 another process has the devices.";

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Directory of the sockets; made if it does not exist, for this user alone. One that belongs
    /// to another user, or that others can write to, is refused
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// The IOMMU is the para-virtual one; the guest needs its module (`guest prepare --module
    /// pviommu`)
    #[arg(long, conflicts_with_all = ["no_iommu", "vhost_user"])]
    pub pviommu: bool,
    /// Take the devices over that another `serve` has in the directory, while their guest runs; the
    /// other one ends with exit code 4. What is the host's is said again: limits, --hopt,
    /// --memory-file, --lock
    #[arg(long, conflicts_with_all = [
        "pviommu", "blk", "read_only", "rng", "net", "errant", "requests", "no_iommu", "vhost_user", "misanswer", "isolate", "assigned", "memory", "cpus",
    ])]
    pub take_over: bool,
    /// Before the other one is stopped: copy, and rebuild, the devices while they work until they
    /// have completed this many requests
    #[arg(
        allow_negative_numbers = true,
        long,
        value_name = "REQUESTS",
        default_value_t = 0,
        requires = "take_over"
    )]
    pub copy_until: u64,
    /// The devices.
    #[command(flatten)]
    pub devices: DeviceArgs,
}

pub(crate) const TOP_LONG: &str = "\
Show what the devices of a `serve` or `guest run` are doing, until Ctrl-C: requests and bytes per second, within what time half and 99 % of \
the requests were served, and what was stopped.

Rates and times are of the last interval. `stale` counts accesses to what had been unmapped shortly before, among the faults.";

/// Arguments of `top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Directory of the sockets, as given by --dir
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Seconds between two looks
    #[arg(long, allow_negative_numbers = true, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    pub interval: f64,
    /// Look once, without rates, and end
    #[arg(long)]
    pub once: bool,
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok();
    seconds
        .filter(|seconds| (0.1..=3600.0).contains(seconds))
        .ok_or_else(|| "it has to be from 0.1 to 3600".into())
}

/// Which devices there are.
#[derive(Debug, Args)]
pub(crate) struct DeviceArgs {
    /// Let members of this group, by its number, connect to the devices and read their tables: for
    /// a QEMU of another user. Otherwise only this user and root can
    #[arg(long, value_name = "GID", help_heading = "Devices")]
    pub group: Option<u32>,
    /// A disk over this raw file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Devices")]
    pub blk: Option<PathBuf>,
    /// The disk cannot be written
    #[arg(long, help_heading = "Devices")]
    pub read_only: bool,
    /// The disk is a process of its own, without any of the guest's memory but what is mapped for
    /// it
    #[arg(long, conflicts_with = "no_iommu", help_heading = "Devices")]
    pub isolate: bool,
    /// The disk is an assigned one: the model of the hardware translates its accesses, with an
    /// IOTLB and tables in memory that the IOMMU keeps; with --no-iommu the host has mapped all of
    /// the guest there
    #[arg(long, conflicts_with_all = ["isolate", "vhost_user"], help_heading = "Devices")]
    pub assigned: bool,
    /// The para-virtual IOMMU's host takes frames for the guest's pages in advance, and keeps a
    /// pointer to the last table that it found one in
    #[arg(long, help_heading = "Devices")]
    pub hopt: bool,
    /// An entropy device
    #[arg(long, help_heading = "Devices")]
    pub rng: bool,
    /// A network device. SIDE is tap=NAME, an interface of the host; socket=PATH, a stream socket
    /// at which whoever comes first listens (QEMU's -netdev stream, or another of these); or
    /// datagram=PATH:PATH, this side's socket and the other's (-netdev dgram)
    #[arg(long, value_name = "SIDE[,queues=N][,mac=ADDRESS]", value_parser = net, help_heading = "Devices")]
    pub net: Option<NetArg>,
    /// The disk misbehaves, to see what stops it: stray:ADDRESS (a write there), after-unmap,
    /// write-read-only, read-write-only, foreign (the entropy device writes to the disk's buffers;
    /// with --rng), after-revoke (around its own translation; with --isolate), storm:ADDRESS (a
    /// million writes there); several, each once
    #[arg(
        long,
        value_name = "CLASS",
        value_delimiter = ',',
        help_heading = "Devices"
    )]
    pub errant: Vec<InjectedDma>,
    /// Write what the guest's IOMMU driver asks for to this file, one request a line, up to
    /// --max-requests
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Devices")]
    pub requests: Option<PathBuf>,
    /// No virtio-iommu: devices see all of the guest's memory
    #[arg(long, help_heading = "Devices")]
    pub no_iommu: bool,
    /// The disk is a vhost-user back-end, behind QEMU's own IOMMU: intel (intel-iommu) or virtio
    /// (virtio-iommu-pci)
    #[arg(
        long,
        value_name = "IOMMU",
        value_parser = foreign,
        conflicts_with_all = ["no_iommu", "rng", "net", "requests"],
        help_heading = "Devices"
    )]
    pub vhost_user: Option<ForeignArg>,
    /// The para-virtual IOMMU answers wrongly, to see what its driver makes of it: never, late,
    /// twice or foreign (as a request that nobody made), each with :N, the requests before
    #[arg(long, value_name = "HOW:N", help_heading = "Devices")]
    pub misanswer: Option<InjectedReply>,
    /// Limits.
    #[command(flatten)]
    pub caps: GuestLimitArgs,
    /// Memory of the guest in MiB
    #[arg(long, allow_negative_numbers = true, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=16384), help_heading = "Devices")]
    pub memory: u32,
    /// The guest's memory is this file, made anew and removed at the end: the host takes pages of
    /// it back when it needs room, without swap. Whoever may write it can end this process by
    /// cutting it off
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "vhost_user", help_heading = "Devices")]
    pub memory_file: Option<PathBuf>,
    /// Keep in the host's memory what an assigned device needs there: mapped, what the para-virtual
    /// IOMMU's driver has mapped; all, as without an IOMMU for the guest
    #[arg(long, value_name = "WHAT", value_parser = lock, conflicts_with = "vhost_user", help_heading = "Devices")]
    pub lock: Option<LockArg>,
    /// Processors of the guest
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16), help_heading = "Devices")]
    pub cpus: u32,
}

/// What a guest can make this process keep. What it asks beyond is refused to it, and said a few
/// times on standard error.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits of a guest")]
pub(crate) struct GuestLimitArgs {
    /// Mappings that its IOMMU driver can have, of all domains together
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 1 << 16, value_parser = positive)]
    pub max_mappings: usize,
    /// Domains
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 64, value_parser = positive)]
    pub max_domains: usize,
    /// Tables of a domain, 4 KiB each; one maps 2 MiB
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 4096, value_parser = tables)]
    pub max_tables: usize,
    /// Descriptors of the disk's queue, a power of two
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 256, value_parser = queue)]
    pub max_queue: u16,
    /// KiB of one request to the disk
    #[arg(long, allow_negative_numbers = true, value_name = "KIB", default_value_t = 16 << 10, value_parser = clap::value_parser!(u64).range(4..=1 << 22))]
    pub max_request: u64,
    /// Pages of 4 KiB that a vhost-user back-end keeps translations of
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 8192, value_parser = iotlb)]
    pub max_iotlb: usize,
    /// MiB of the file of --requests. Further requests are only counted: its last line is then
    /// `lost N`, not `end`
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub max_requests: u64,
    /// Translations that it asks for at a time
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 64, value_parser = positive)]
    pub max_misses: usize,
}

fn positive(text: &str) -> Result<usize, String> {
    at_least(1, text)
}

/// With fewer, an access to as many pages as one can have would never find all of them there.
fn iotlb(text: &str) -> Result<usize, String> {
    at_least(1024, text)
}

/// One page takes a table of each level. A domain has the address space for all that it may have: 1
/// GiB of it, at most.
fn tables(text: &str) -> Result<usize, String> {
    between(4, 1 << 18, text)
}

fn at_least(least: usize, text: &str) -> Result<usize, String> {
    between(least, 1 << 30, text)
}

fn between(least: usize, most: usize, text: &str) -> Result<usize, String> {
    let number = text.parse().ok();
    number
        .filter(|number| (least..=most).contains(number))
        .ok_or_else(|| format!("it has to be from {least} to {most}"))
}

fn queue(text: &str) -> Result<u16, String> {
    let size = text.parse().ok();
    size.filter(|size: &u16| size.is_power_of_two() && (4..=1024).contains(size))
        .ok_or_else(|| "it has to be a power of two from 4 to 1024".into())
}

/// What to do with guests.
#[derive(Debug, Subcommand)]
pub(crate) enum GuestCommand {
    /// Boot a guest, run a command in it, end with the command's exit code
    #[command(long_about = GUEST_RUN_LONG, after_help = GUEST_RUN_EXAMPLES)]
    Run(Box<GuestRunArgs>),
    /// Fetch and build what a guest needs, and print where it is
    #[command(long_about = GUEST_PREPARE_LONG, after_help = GUEST_PREPARE_EXAMPLES)]
    Prepare(GuestPrepareArgs),
    /// Inside a guest: time direct reads of 4 KiB
    #[command(long_about = GUEST_READS_LONG)]
    Reads(GuestReadsArgs),
    /// Have the software IOMMU judged by QEMU's own, over what a stock Linux maps
    #[command(long_about = GUEST_JUDGE_LONG)]
    Judge(GuestJudgeArgs),
}

const GUEST_READS_LONG: &str = "\
Inside a guest: time direct reads of 4 KiB.

In a guest that was booted with --icount a nanosecond is an instruction. What a processor of the guest's works for a read is told without what \
the read waits for its disk: meanwhile another thread counts its own turns. Reads whose data was there before they had begun to wait work less, \
and are told apart:

  ringfence guest run --icount --with-ringfence -- ringfence guest reads /dev/vda";

/// Arguments of `guest reads`.
#[derive(Debug, Args)]
pub(crate) struct GuestReadsArgs {
    /// What to read
    pub file: PathBuf,
    /// How many reads
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub count: u32,
}

const GUEST_JUDGE_LONG: &str = "\
Have the software IOMMU judged by QEMU's own, over what a stock Linux maps.

Boots a guest behind QEMU's intel-iommu whose disk lives here. What QEMU tells of the guest's mappings goes into the software IOMMU, and \
random accesses, legal and errant, are tried through both while the guest is stopped: both have to let an access through, to the same \
bytes, or both to reject it. QEMU tells of a mapping for writing only as one for both; reads that it then rejects are counted apart.

The exit code is 0 if as many cases were tried as asked for, and none differs. A command, if one is given, is what the guest does instead of \
reading and writing its disk.";

/// Arguments of `guest judge`.
#[derive(Debug, Args)]
pub(crate) struct GuestJudgeArgs {
    /// Which guest.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Accesses to try
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub cases: u32,
    /// The seed of the choices
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "SEED",
        default_value_t = 1
    )]
    pub seed: u64,
    /// Longest life of the guest in seconds
    #[arg(long, allow_negative_numbers = true, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub limit: u64,
}

const GUEST_PREPARE_LONG: &str = "\
Fetch and build what a guest needs, and print where it is.

For a QEMU that you start yourself, with the devices of `ringfence serve`: prints assignments for a shell, QEMU (the program and its first \
arguments), KERNEL (the image), APPEND (the kernel's command line) and INITRAMFS. The user space runs a command as that of `guest run` \
does: its input and output are the second serial line, its exit code goes to the third.";

const GUEST_PREPARE_EXAMPLES: &str = "\
Examples:
  ringfence serve --dir RUN --blk disk.img >arguments &
  eval \"$(ringfence guest prepare -- md5sum /dev/vda)\"
  eval \"$QEMU $(cat arguments)\" -display none -kernel '$KERNEL' -initrd '$INITRAMFS' -append '\"$APPEND\"' \\
    -serial file:console -serial stdio -serial file:status";

/// Which guest.
#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// Debian kernel, by the beginning of its version; `latest` is the newest when it was fetched,
    /// a path a directory with unpacked packages
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
    /// Where what was fetched is kept
    #[arg(long, value_name = "DIR", default_value = "target/guest", value_hint = ValueHint::DirPath)]
    pub cache: PathBuf,
    /// The command [default: a shell]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// A module of ours that the guest loads before its drivers.
#[derive(Debug, Args)]
pub(crate) struct ModuleArgs {
    /// Load this module, built for the guest's kernel: pviommu, the driver of the para-virtual
    /// IOMMU, which then stands in place of the virtio-iommu
    #[arg(long, value_name = "NAME", value_parser = ["pviommu"])]
    pub module: Option<String>,
    /// Its parameters, as insmod takes them: "cache=0 t_ms=1000"
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true,
        requires = "module"
    )]
    pub module_args: String,
    /// Put this one of the modules into the guest, at /modules/NAME.ko, for the command to load
    #[arg(long, value_name = "NAME", value_parser = ["dma_count"])]
    pub with_module: Option<String>,
    /// Where the modules' sources are
    #[arg(long, value_name = "DIR", default_value = "kmod", value_hint = ValueHint::DirPath)]
    pub module_source: PathBuf,
}

/// Arguments of `guest prepare`.
#[derive(Debug, Args)]
pub(crate) struct GuestPrepareArgs {
    /// Which guest.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// A module.
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Write the user space here
    #[arg(long, value_name = "FILE", default_value = "initramfs.cpio", value_hint = ValueHint::FilePath)]
    pub initramfs: PathBuf,
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
  ringfence guest run --kernel latest --lazy --metrics -- md5sum /dev/vda
  ringfence guest run --module pviommu -- sh -c 'md5sum /dev/vda; grep -r . /sys/kernel/debug/pviommu'
  ringfence guest run                                 a shell

Exit codes: the command's; 1 also if the guest could not be booted or ended without one.";

/// Arguments of `guest run`.
#[derive(Debug, Args)]
pub(crate) struct GuestRunArgs {
    /// Which guest.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// A module.
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Longest life of the guest in seconds
    #[arg(long, allow_negative_numbers = true, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub limit: u64,
    /// Keep sockets, tables and the console here [default: a temporary directory, kept only if the
    /// guest fails]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Time is the number of instructions, a nanosecond each, and doorbells are answered before the
    /// guest goes on
    #[arg(long)]
    pub icount: bool,
    /// Put this program into the guest
    #[arg(long)]
    pub with_ringfence: bool,
    /// Print the devices' counters to standard error at the end
    #[arg(long)]
    pub metrics: bool,
    /// The devices; without --blk the disk is an empty one of 64 MiB.
    #[command(flatten)]
    pub devices: DeviceArgs,
}

/// An IOMMU of QEMU's, likewise.
#[cfg(feature = "live")]
pub(crate) type ForeignArg = ringfence_live::guest::QemuIommu;
#[cfg(not(feature = "live"))]
pub(crate) type ForeignArg = String;

#[cfg(not(feature = "live"))]
fn foreign(text: &str) -> Result<ForeignArg, String> {
    Ok(text.to_owned())
}

#[cfg(feature = "live")]
fn foreign(text: &str) -> Result<ForeignArg, String> {
    match text {
        "intel" => Ok(ForeignArg::Intel),
        "virtio" => Ok(ForeignArg::Virtio),
        _ => Err("it is intel or virtio".into()),
    }
}

/// What is kept in the host's memory, likewise.
#[cfg(feature = "live")]
pub(crate) type LockArg = ringfence_live::Locked;
#[cfg(not(feature = "live"))]
pub(crate) type LockArg = String;

#[cfg(not(feature = "live"))]
fn lock(text: &str) -> Result<LockArg, String> {
    Ok(text.to_owned())
}

#[cfg(feature = "live")]
fn lock(text: &str) -> Result<LockArg, String> {
    match text {
        "mapped" => Ok(LockArg::Mapped),
        "all" => Ok(LockArg::All),
        _ => Err("it is mapped or all".into()),
    }
}

/// A network device, as it was read. In a build without such devices it is only checked for being
/// there.
#[cfg(feature = "live")]
pub(crate) type NetArg = ringfence_live::daemon::NetOptions;
#[cfg(not(feature = "live"))]
pub(crate) type NetArg = String;

#[cfg(not(feature = "live"))]
fn net(text: &str) -> Result<NetArg, String> {
    Ok(text.to_owned())
}

#[cfg(feature = "live")]
fn net(text: &str) -> Result<NetArg, String> {
    use ringfence_live::virtio::net::MAX_PAIRS;

    let mut words = text.split(',');
    let link = words.next().unwrap_or_default().parse();
    let mut options = NetArg {
        link: link.map_err(|error: ringfence_live::link::AddressError| error.to_string())?,
        pairs: std::num::NonZeroU16::MIN,
        mac: None,
    };
    for word in words {
        match word.split_once('=') {
            Some(("queues", number)) => {
                options.pairs = number
                    .parse()
                    .ok()
                    .filter(|pairs: &std::num::NonZeroU16| pairs.get() <= MAX_PAIRS)
                    .ok_or_else(|| format!("queues has to be from 1 to {MAX_PAIRS}"))?;
            }
            Some(("mac", text)) => options.mac = Some(mac(text)?),
            _ => return Err(format!("{word:?} is neither queues=N nor mac=ADDRESS")),
        }
    }
    Ok(options)
}

/// Six bytes that name one device, not a group.
#[cfg(feature = "live")]
fn mac(text: &str) -> Result<[u8; 6], String> {
    // Digits only: numbers would also be read with a sign.
    let digits = |part: &str| part.len() == 2 && part.bytes().all(|c| c.is_ascii_hexdigit());
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|part| u8::from_str_radix(part, 16).ok().filter(|_| digits(part)))
        .collect();
    let mac: Option<[u8; 6]> = bytes.and_then(|bytes| bytes.try_into().ok());
    mac.filter(|[first, ..]| first & 1 == 0)
        .ok_or_else(|| "mac has to be like 52:54:00:12:34:56, of one device".into())
}

#[cfg(all(test, feature = "live"))]
mod tests {
    use super::*;

    #[test]
    fn network_devices() {
        let read = |text| {
            net(text).map(|options| (options.pairs.get(), options.mac.map(|[.., last]| last)))
        };
        assert_eq!(read("tap=tap0"), Ok((1, None)));
        assert_eq!(
            read("socket=/a,queues=4,mac=52:54:00:00:00:0a"),
            Ok((4, Some(10)))
        );
        for text in [
            "",
            "tap",
            "bridge=a",
            "tap=a,queues=0",
            "tap=a,queues=9",
            "tap=a,mac=53:54:00:00:00:01",
            "tap=a,mac=52:54:00:00:01",
            "tap=a,mac=52:54:00:00:00:1",
            "tap=a,mac=52:54:00:00:00:+1",
            "tap=a,,",
            "tap=a,mtu=9000",
        ] {
            assert!(net(text).is_err(), "{text}");
        }
    }
}
