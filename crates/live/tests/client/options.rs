//! Combinations of device options: every pair is served, or refused with the message listed here.

use std::fs;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;

use ringfence_live::Locked;
use ringfence_live::daemon::{Daemon, DeviceOptions, Log, NetOptions};
use ringfence_live::dma_fault_injection::InjectedDma;
use ringfence_live::guest::QemuIommu;
use ringfence_live::host::HostPagePool;
use ringfence_live::limits::GuestLimits;
use ringfence_live::link::Address;
use ringfence_live::sandbox::SandboxProgram;
use ringfence_types::Iova;

/// An option with its name on the command line.
type Setting = (&'static str, fn(&mut DeviceOptions));

/// All options, with the disk image `disk.img` in the current directory.
const SETTINGS: [Setting; 28] = [
    ("blk", |devices| devices.disk = Some("disk.img".into())),
    ("read-only", |devices| devices.read_only = true),
    ("isolate", |devices| {
        devices.sandbox = Some(SandboxProgram {
            path: env!("CARGO_BIN_EXE_ringfence-test-simulator").into(),
            arguments: Vec::new(),
        });
    }),
    ("rng", |devices| devices.entropy = true),
    ("net", |devices| {
        devices.net = Some(NetOptions {
            link: "socket=net.peer".parse::<Address>().unwrap(),
            pairs: NonZeroU16::MIN,
            mac: None,
        });
    }),
    ("inject-dma", |devices| {
        devices
            .inject_dma
            .push(InjectedDma::Stray(Iova::new(0xdead_0000)));
    }),
    ("inject-dma=after-unmap", |devices| {
        devices.inject_dma.push(InjectedDma::AfterUnmap);
    }),
    ("inject-dma=foreign", |devices| {
        devices.inject_dma.push(InjectedDma::Foreign);
    }),
    ("inject-dma=after-revoke", |devices| {
        devices.inject_dma.push(InjectedDma::AfterRevoke);
    }),
    ("late", |devices| {
        devices.delay = Some(std::time::Duration::from_millis(1));
    }),
    ("requests", |devices| {
        devices.requests = Some("requests".into());
    }),
    ("no-iommu", |devices| devices.untranslated = true),
    ("vhost-user=intel", |devices| {
        devices.vhost_user = Some(QemuIommu::Intel);
    }),
    ("vhost-user=virtio", |devices| {
        devices.vhost_user = Some(QemuIommu::Virtio);
    }),
    ("pviommu", |devices| devices.paravirtual = true),
    ("inject-reply", |devices| {
        devices.inject_reply = Some("never:1".parse().unwrap());
    }),
    ("memory-file", |devices| {
        devices.memory.file = Some("memory".into());
    }),
    ("lock=mapped", |devices| {
        devices.memory.locked = Locked::Mapped;
    }),
    ("lock=all", |devices| devices.memory.locked = Locked::All),
    ("max-mappings", |devices| devices.limits.mappings = 1),
    ("max-domains", |devices| devices.limits.domains = 1),
    ("max-tables", |devices| devices.limits.tables = 4),
    ("max-queue", |devices| devices.limits.queue_size = 1024),
    ("max-request", |devices| devices.limits.request_bytes = 4096),
    ("max-iotlb", |devices| devices.limits.iotlb_pages = 1024),
    ("max-misses", |devices| devices.limits.iotlb_misses = 1),
    ("assigned", |devices| devices.assigned = true),
    ("hopt", |devices| {
        devices.host_page_pool = HostPagePool::On;
    }),
];

const NO_DISK: [&str; 4] = [
    "there is no disk to be read-only",
    "there is no disk to be in a process of its own",
    "it is the disk that misbehaves, and there is none",
    "only the disk can be a vhost-user back-end, and there is none",
];
const APART: &str = "only a disk in a process of its own can use what was revoked";
const WRONG: &str = "it is the para-virtual IOMMU that answers wrongly, and there is none";
const HOST: &str = "the pool of frames and the pointer to the last table are the para-virtual \
    IOMMU's, and there is none";
const ANOTHER: &str =
    "the entropy device misbehaves as another device than the disk, and there is none";

/// Returns the message that refuses an option on its own, with a disk.
fn alone(name: &str) -> Option<&'static str> {
    match name {
        "inject-dma=after-revoke" => Some(APART),
        "inject-dma=foreign" => Some(ANOTHER),
        "inject-reply" => Some(WRONG),
        "lock=mapped" => Some(LOCKED),
        "hopt" => Some(HOST),
        _ => None,
    }
}

const LOCKED: &str =
    "what is locked is what the para-virtual IOMMU's driver maps, and there is none";
const SEALED: &str = "a vhost-user back-end takes sealed memory only, and locks none of it";
const LATE: &str = "only a disk that is served here, and by its registers, can be late";

/// Messages that refuse pairs of options, in either order, with a disk; `*` matches any end of a
/// name.
const PAIRS: [(&str, &str, &str); 22] = [
    ("vhost-user*", "memory-file", SEALED),
    ("vhost-user*", "lock*", SEALED),
    (
        "assigned",
        "isolate",
        "a disk in a process of its own is granted its pages, and nothing translates its accesses",
    ),
    (
        "assigned",
        "vhost-user*",
        "a vhost-user back-end's accesses are translated by QEMU's IOMMU, not by the model of the \
        hardware",
    ),
    ("late", "isolate", LATE),
    ("late", "vhost-user*", LATE),
    (
        "vhost-user*",
        "no-iommu",
        "a vhost-user back-end stands behind QEMU's IOMMU, and there would be none",
    ),
    (
        "vhost-user*",
        "pviommu",
        "a vhost-user back-end stands behind QEMU's IOMMU, not behind the para-virtual one",
    ),
    (
        "vhost-user*",
        "rng",
        "only the disk can be a vhost-user back-end",
    ),
    (
        "vhost-user*",
        "net",
        "only the disk can be a vhost-user back-end",
    ),
    (
        "vhost-user*",
        "requests",
        "what is written down is what the virtio-iommu's driver asks for, and there is no \
        virtio-iommu",
    ),
    (
        "vhost-user*",
        "isolate",
        "a process of its own is granted what an IOMMU of ours maps, and there is none",
    ),
    ("vhost-user*", "inject-reply", WRONG),
    (
        "pviommu",
        "no-iommu",
        "there is the para-virtual IOMMU or there is none",
    ),
    (
        "pviommu",
        "requests",
        "what is written down is what the virtio-iommu's driver asks for, and there is no \
        virtio-iommu",
    ),
    (
        "pviommu",
        "max-mappings",
        "mappings, domains and tables are limited for the virtio-iommu, and there is none",
    ),
    (
        "pviommu",
        "max-domains",
        "mappings, domains and tables are limited for the virtio-iommu, and there is none",
    ),
    (
        "pviommu",
        "max-tables",
        "mappings, domains and tables are limited for the virtio-iommu, and there is none",
    ),
    (
        "no-iommu",
        "requests",
        "what is written down is what the virtio-iommu's driver asks for, and there is no \
        virtio-iommu",
    ),
    (
        "no-iommu",
        "isolate",
        "a process of its own is granted what an IOMMU of ours maps, and there is none",
    ),
    ("no-iommu", "inject-reply", WRONG),
    (
        "isolate",
        "inject-dma=foreign",
        "a disk in a process of its own has no other device to misbehave for it",
    ),
];

/// Pairs of options that are valid together, though one alone is refused.
const MENDED: [(&str, &str); 6] = [
    // The later option takes effect.
    ("lock=mapped", "lock=all"),
    ("pviommu", "lock=mapped"),
    ("pviommu", "inject-reply"),
    ("pviommu", "hopt"),
    ("isolate", "inject-dma=after-revoke"),
    ("rng", "inject-dma=foreign"),
];

fn is(name: &str, pattern: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == pattern,
    }
}

fn pair((a, b): (&str, &str), (c, d): (&str, &str)) -> bool {
    is(a, c) && is(b, d) || is(b, c) && is(a, d)
}

fn expected(a: &str, b: &str) -> Option<&'static str> {
    if MENDED.iter().any(|mended| pair((a, b), *mended)) {
        return None;
    }
    let both = PAIRS.iter().find(|(c, d, _)| pair((a, b), (c, d)));
    both.map(|(.., why)| *why).or(alone(a)).or(alone(b))
}

fn devices(settings: &[&Setting], dir: &std::path::Path) -> DeviceOptions {
    let mut devices = DeviceOptions {
        limits: GuestLimits::default(),
        ..DeviceOptions::default()
    };
    for (_, set) in settings {
        set(&mut devices);
    }
    let here = |path: &mut PathBuf| *path = dir.join(&*path);
    devices.disk.as_mut().map(here);
    devices.requests.as_mut().map(here);
    devices.memory.file.as_mut().map(here);
    if let Some(net) = &mut devices.net {
        let path = dir.join("net.peer");
        net.link = format!("socket={}", path.display()).parse().unwrap();
    }
    devices
}

#[test]
fn every_pair_is_served_or_refused_with_its_reason() {
    let dir = tempfile::tempdir().unwrap().keep();
    fs::write(dir.join("disk.img"), [0; 4096]).unwrap();
    let log: Log = Arc::new(|_, _| ());
    let (disk, others) = SETTINGS.split_first().unwrap();
    let (mut served, mut refused) = (0, 0);
    for (at, a) in others.iter().enumerate() {
        for b in &others[at..] {
            let devices = devices(&[disk, a, b], &dir);
            let why = expected(a.0, b.0);
            assert_eq!(devices.check().err(), why, "{} {}", a.0, b.0);
            let started = Daemon::start(&dir, &devices, &log);
            match (started, why) {
                (Ok(mut daemon), None) => {
                    served += 1;
                    assert!(daemon.machine().device_arguments().is_ok());
                    daemon.stopper().stop();
                    daemon.join().unwrap();
                }
                (Err((_, error)), Some(why)) => {
                    refused += 1;
                    assert_eq!(error.to_string(), why);
                }
                (started, why) => panic!("{} {}: {started:?}, {why:?}", a.0, b.0),
            }
        }
    }
    let setting = |name| SETTINGS.iter().find(|(other, _)| *other == name).unwrap();
    // For each kind of device.
    for kind in ["assigned", "isolate", "net", "blk"] {
        let these = ["blk", "pviommu", "hopt", kind].map(setting);
        let daemon = Daemon::start(&dir, &devices(&these, &dir), &log).unwrap();
        daemon.stopper().stop();
        daemon.join().unwrap();
    }
    println!("{served} pairs served, {refused} refused");
    assert!(served > 100 && refused > 50, "{served} {refused}");
    // Without a disk.
    for (name, set) in others {
        let mut devices = DeviceOptions::default();
        set(&mut devices);
        let why = match *name {
            "read-only" => Some(NO_DISK[0]),
            "isolate" => Some(NO_DISK[1]),
            "late" => Some("it is the disk that is late, and there is none"),
            "assigned" => Some("it is the disk that the hardware translates, and there is none"),
            name if name.starts_with("inject-dma") => Some(NO_DISK[2]),
            name if name.starts_with("vhost-user") => Some(NO_DISK[3]),
            name => alone(name),
        };
        assert_eq!(devices.check().err(), why, "{name}");
    }
    fs::remove_dir_all(&dir).unwrap();
}
