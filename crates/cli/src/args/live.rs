//! The command line of the subcommands that serve guests.

use std::num::NonZeroU16;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueHint};
use ringfence_live::Locked;
use ringfence_live::daemon::NetOptions;
use ringfence_live::dma_fault_injection::InjectedDma;
use ringfence_live::link::AddressError;
use ringfence_live::virtio::net::MAX_PAIRS;
use ringfence_live::virtio::pviommu::InjectedReply;

use super::disk::{DiskArg, IommuKind, disk};

pub(crate) const SERVE_LONG: &str = "\
Serve virtio devices to a QEMU; a virtio-iommu translates all their DMA.

Each device listens on its own socket in the directory, for QEMU's vfio-user-pci (10.1 or later). \
The command prints the arguments that QEMU needs; add a kernel, its user space and a console. The \
guest's kernel needs virtio-iommu and VIOT (Debian's since 6.12). metrics.sock serves counters in \
Prometheus's text format.

Another process can take over the devices while the guest runs (--take-over); the guest sees only \
a pause.

Ends with Ctrl-C. Exit codes: 0 done, 1 error, 2 wrong usage, 4 another process has the devices.";

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Directory of the sockets; created for this user alone if it does not exist. A directory that
    /// belongs to another user, or that others can write to, is refused
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Take over the devices of a running `serve` in the directory without stopping the guest. The
    /// old process exits with code 4. Repeat host-side options: limits, --host-page-pool,
    /// --memory-file, --lock
    #[arg(long, conflicts_with_all = [
        "iommu", "disk", "rng", "net", "inject_dma", "record_requests", "record_dmas",
        "inject_reply", "memory", "cpus",
    ])]
    pub take_over: bool,
    /// Repeat the pre-copy, which copies and rebuilds running devices, until they have completed
    /// this many requests. 0: one pre-copy
    #[arg(
        long,
        value_name = "REQUESTS",
        default_value_t = 0,
        requires = "take_over"
    )]
    pub precopy_requests: u64,
    /// Options of the devices.
    #[command(flatten)]
    pub devices: DeviceArgs,
}

pub(crate) const TOP_LONG: &str = "\
Show the activity of the devices of a `serve` or `guest run`, until Ctrl-C: requests and bytes per \
second, median and 99th percentile of the request latency, and stopped accesses.

Rates and latencies cover the last interval. `stale` counts the faults at recently unmapped \
addresses.";

/// Arguments of `top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Directory of the sockets, as given by --dir
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Seconds between two samples
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    pub interval: f64,
    /// Print one sample, without rates, and exit
    #[arg(long)]
    pub once: bool,
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok();
    seconds
        .filter(|seconds| (0.1..=3600.0).contains(seconds))
        .ok_or_else(|| "expected 0.1 to 3600 seconds".into())
}

/// Options of the devices.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Devices")]
pub(crate) struct DeviceArgs {
    /// Let members of this group (a number) connect to the devices and read their tables, for a
    /// QEMU of another user. By default only this user and root can
    #[arg(long, value_name = "GID")]
    pub group: Option<u32>,
    /// IOMMU of the guest
    #[arg(long, value_name = "KIND", value_enum, default_value_t)]
    pub iommu: IommuKind,
    /// Add a disk backed by this raw file. mode=emulated (the default): this process serves it, and
    /// the IOMMU translates its accesses in software. mode=sandbox: a sandboxed process serves it,
    /// which has only the guest memory that the IOMMU maps for the disk. mode=assigned: the
    /// hardware model translates its accesses, with an IOTLB and tables in memory that the IOMMU
    /// maintains; with --iommu none, the host maps all guest memory there. bus=virtio (the
    /// default): a virtio block device. bus=nvme: an NVMe controller, which cannot have
    /// mode=sandbox and cannot be handed over. Write a comma in FILE twice
    #[arg(
        long,
        value_name = "FILE[,bus=BUS][,mode=MODE][,readonly=on]",
        value_parser = OsStringValueParser::new().try_map(|text| disk(&text)),
        value_hint = ValueHint::FilePath,
    )]
    pub disk: Option<DiskArg>,
    /// Let the para-virtual IOMMU's host allocate frames for the guest's pages in advance, and keep
    /// a pointer to the last table used in a lookup
    #[arg(long)]
    pub host_page_pool: bool,
    /// Add an entropy device
    #[arg(long)]
    pub rng: bool,
    /// Add a network device. SIDE is tap=NAME, an interface of the host; socket=PATH, a stream
    /// socket on which the first process to start listens (QEMU's -netdev stream, or another of
    /// these); or datagram=PATH:PATH, this side's socket and the other's (-netdev dgram)
    #[arg(long, value_name = "SIDE[,queues=N][,mac=ADDRESS]", value_parser = net)]
    pub net: Option<NetOptions>,
    /// Inject illegal DMA of the disk: stray:ADDRESS (a write there), after-unmap, write-read-only,
    /// read-write-only, foreign (the entropy device writes to the disk's buffers; requires --rng),
    /// after-revoke (bypasses the device's own translation; requires mode=sandbox), storm:ADDRESS
    /// (a million writes there), keep-reading (the data of each write request after its interrupt;
    /// requires bus=virtio). Separate several by commas; all but the last are injected once
    #[arg(long, value_name = "CLASS", value_delimiter = ',')]
    pub inject_dma: Vec<InjectedDma>,
    /// Record the requests of the guest's virtio-iommu driver in this file, one per line, up to
    /// --max-record MiB
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub record_requests: Option<PathBuf>,
    /// Record the DMAs of the devices, and the maps and unmaps of the guest's virtio-iommu driver,
    /// as a trace in this file, up to --max-record MiB. The other commands read it. Requires
    /// mode=emulated
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub record_dmas: Option<PathBuf>,
    /// Inject a wrong reply of the para-virtual IOMMU: never, late, twice or foreign (to a request
    /// that was not sent), after N correct replies
    #[arg(long, value_name = "HOW:N")]
    pub inject_reply: Option<InjectedReply>,
    /// Memory of the guest in MiB
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 512,
        value_parser = clap::value_parser!(u32).range(64..=16384),
    )]
    pub memory: u32,
    /// Back the guest's memory by this file, which is created anew and removed at the end. The host
    /// can then reclaim its pages without swap. A user who can write the file can end this process
    /// by truncating it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub memory_file: Option<PathBuf>,
    /// Lock guest memory of an assigned device into host memory. mapped: the pages that the
    /// para-virtual IOMMU's driver has mapped; all: all guest memory, as without an IOMMU for the
    /// guest
    #[arg(long, value_name = "WHAT", value_parser = lock)]
    pub lock: Option<Locked>,
    /// Number of CPUs of the guest
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=16),
    )]
    pub cpus: u32,
    /// Limits of the guest.
    #[command(flatten)]
    pub caps: GuestLimitArgs,
}

/// Limits on the resources of this process that a guest can use. Requests beyond a limit are
/// refused, and reported a few times on standard error.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Limits of a guest")]
pub(crate) struct GuestLimitArgs {
    /// Mappings of its IOMMU driver, in all domains together
    #[arg(long, value_name = "N", default_value_t = 1 << 16, value_parser = positive)]
    pub max_mappings: usize,
    /// Domains of its IOMMU driver
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = positive)]
    pub max_domains: usize,
    /// Tables of a domain, 4 KiB each; one maps 2 MiB
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = tables)]
    pub max_tables: usize,
    /// Descriptors of the disk's queue, a power of two
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = queue)]
    pub max_queue: u16,
    /// KiB of one request to the disk
    #[arg(
        long,
        value_name = "KIB",
        default_value_t = 16 << 10,
        value_parser = clap::value_parser!(u64).range(4..=1 << 22),
    )]
    pub max_request: u64,
    /// Pages of 4 KiB whose translations a vhost-user back-end keeps
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = iotlb)]
    pub max_iotlb: usize,
    /// MiB of the file of --record-requests, and of that of --record-dmas. Further requests or DMAs
    /// are only counted: the last line is then `lost N`, not `end`, or `[LOST N EVENTS]`, not
    /// `# end`
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 1024,
        value_parser = clap::value_parser!(u64).range(1..=1 << 20),
    )]
    pub max_record: u64,
    /// Translations that a vhost-user back-end requests at a time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = positive)]
    pub max_misses: usize,
}

fn positive(text: &str) -> Result<usize, String> {
    at_least(1, text)
}

/// Parses a number of pages. With fewer than 1024, an access to the maximum number of pages would
/// never find all their translations at once.
fn iotlb(text: &str) -> Result<usize, String> {
    at_least(1024, text)
}

/// Parses a number of tables. One page needs a table on each level. A domain reserves address space
/// for its maximum number of tables: at most 1 GiB.
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
        .ok_or_else(|| format!("expected {least} to {most}"))
}

fn queue(text: &str) -> Result<u16, String> {
    let size = text.parse().ok();
    size.filter(|size: &u16| size.is_power_of_two() && (4..=1024).contains(size))
        .ok_or_else(|| "expected a power of two from 4 to 1024".into())
}

fn lock(text: &str) -> Result<Locked, String> {
    match text {
        "mapped" => Ok(Locked::Mapped),
        "all" => Ok(Locked::All),
        _ => Err("expected mapped or all".into()),
    }
}

fn net(text: &str) -> Result<NetOptions, String> {
    let mut words = text.split(',');
    let link = words.next().unwrap_or_default().parse();
    let mut options = NetOptions {
        link: link.map_err(|error: AddressError| error.to_string())?,
        pairs: NonZeroU16::MIN,
        mac: None,
    };
    for word in words {
        match word.split_once('=') {
            Some(("queues", number)) => {
                options.pairs = number
                    .parse()
                    .ok()
                    .filter(|pairs: &NonZeroU16| pairs.get() <= MAX_PAIRS)
                    .ok_or_else(|| format!("queues must be 1 to {MAX_PAIRS}"))?;
            }
            Some(("mac", text)) => options.mac = Some(mac(text)?),
            _ => return Err(format!("{word:?} is neither queues=N nor mac=ADDRESS")),
        }
    }
    Ok(options)
}

/// Parses six bytes that name one device, not a group.
fn mac(text: &str) -> Result<[u8; 6], String> {
    // Digits only: `from_str_radix` would accept a sign.
    let digits = |part: &str| part.len() == 2 && part.bytes().all(|c| c.is_ascii_hexdigit());
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|part| u8::from_str_radix(part, 16).ok().filter(|_| digits(part)))
        .collect();
    let mac: Option<[u8; 6]> = bytes.and_then(|bytes| bytes.try_into().ok());
    mac.filter(|[first, ..]| first & 1 == 0)
        .ok_or_else(|| "mac must be an individual address, such as 52:54:00:12:34:56".into())
}

#[cfg(test)]
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
