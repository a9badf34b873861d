//! Combinations of device options: every pair is served, or refused with the message listed here.

use std::fs;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringfence_live::Locked;
use ringfence_live::daemon::{
    Daemon, DeviceOptions, Disk, DiskBus, DiskMode, Iommu, Log, NetOptions, VfioUserDevices,
    VhostUserDisk,
};
use ringfence_live::dma_fault_injection::InjectedDma;
use ringfence_live::host::HostPagePool;
use ringfence_live::limits::GuestLimits;
use ringfence_live::link::Address;
use ringfence_live::qemu::QemuIommu;
use ringfence_live::sandbox::SandboxProgram;
use ringfence_types::Iova;

/// An option with its name on the command line. Options of one word before `=` exclude each other.
type Setting = (&'static str, fn(&mut VfioUserDevices, &mut GuestLimits));

fn disk(devices: &mut VfioUserDevices) -> &mut Disk {
    devices.disk.get_or_insert_with(|| Disk::new("disk.img"))
}

/// All options, with the disk image `disk.img` in the current directory.
const SETTINGS: [Setting; 32] = [
    ("iommu=none", |devices, _| devices.iommu = Iommu::None),
    ("iommu=virtio, requests", |devices, _| {
        let requests = Some("requests".into());
        devices.iommu = Iommu::Virtio {
            requests,
            dmas: None,
        };
    }),
    ("iommu=virtio, dmas", |devices, _| {
        devices.iommu = Iommu::Virtio {
            requests: None,
            dmas: Some("dmas".into()),
        };
    }),
    ("iommu=pviommu", |devices, _| {
        devices.iommu = Iommu::PVIOMMU;
    }),
    ("iommu=pviommu, host-page-pool", |devices, _| {
        devices.iommu = Iommu::Pviommu {
            host_page_pool: HostPagePool::On,
            inject_reply: None,
        };
    }),
    ("iommu=pviommu, inject-reply", |devices, _| {
        devices.iommu = Iommu::Pviommu {
            host_page_pool: HostPagePool::Off,
            inject_reply: Some("never:1".parse().unwrap()),
        };
    }),
    ("mode=assigned", |devices, _| {
        disk(devices).mode = DiskMode::ASSIGNED;
    }),
    ("mode=assigned, late", |devices, _| {
        disk(devices).mode = DiskMode::Assigned { delay: LATE };
    }),
    ("mode=emulated, late", |devices, _| {
        disk(devices).mode = DiskMode::Emulated { delay: LATE };
    }),
    ("mode=sandbox", |devices, _| {
        disk(devices).mode = DiskMode::Sandbox(SandboxProgram {
            path: env!("CARGO_BIN_EXE_ringfence-test-simulator").into(),
            arguments: Vec::new(),
        });
    }),
    ("bus=nvme", |devices, _| disk(devices).bus = DiskBus::Nvme),
    ("readonly", |devices, _| disk(devices).read_only = true),
    ("inject-dma stray", |devices, _| {
        let stray = InjectedDma::Stray(Iova::new(0xdead_0000));
        disk(devices).inject_dma.push(stray);
    }),
    ("inject-dma storm", |devices, _| {
        let storm = InjectedDma::Storm(Iova::new(0xdead_0000));
        disk(devices).inject_dma.push(storm);
    }),
    ("inject-dma after-unmap", |devices, _| {
        disk(devices).inject_dma.push(InjectedDma::AfterUnmap);
    }),
    ("inject-dma write-read-only", |devices, _| {
        disk(devices).inject_dma.push(InjectedDma::WriteReadOnly);
    }),
    ("inject-dma read-write-only", |devices, _| {
        disk(devices).inject_dma.push(InjectedDma::ReadWriteOnly);
    }),
    ("inject-dma foreign", |devices, _| {
        disk(devices).inject_dma.push(InjectedDma::Foreign);
    }),
    ("inject-dma after-revoke", |devices, _| {
        disk(devices).inject_dma.push(InjectedDma::AfterRevoke);
    }),
    ("inject-dma keep-reading", |devices, _| {
        disk(devices).inject_dma.push(InjectedDma::KeepReading);
    }),
    ("rng", |devices, _| devices.entropy = true),
    ("net", |devices, _| {
        devices.net = Some(NetOptions {
            link: "socket=net.peer".parse::<Address>().unwrap(),
            pairs: NonZeroU16::MIN,
            mac: None,
        });
    }),
    ("memory-file", |devices, _| {
        devices.memory.file = Some("memory".into());
    }),
    ("lock=mapped", |devices, _| {
        devices.memory.locked = Locked::Mapped;
    }),
    ("lock=all", |devices, _| {
        devices.memory.locked = Locked::All;
    }),
    ("max-mappings", |_, limits| limits.mappings = 1),
    ("max-domains", |_, limits| limits.domains = 1),
    ("max-tables", |_, limits| limits.tables = 4),
    ("max-queue", |_, limits| limits.queue_size = 1024),
    ("max-request", |_, limits| limits.request_bytes = 4096),
    ("max-iotlb", |_, limits| limits.iotlb_pages = 1024),
    ("max-misses", |_, limits| limits.iotlb_misses = 1),
];

const LATE: Option<Duration> = Some(Duration::from_millis(1));

const SANDBOX: &str = "--disk mode=sandbox requires --iommu virtio or --iommu pviommu, which grant \
    the process its pages";
const NVME: &str = "--disk bus=nvme requires mode=emulated or mode=assigned";
const FOREIGN_SANDBOX: &str = "--inject-dma foreign requires --disk mode=emulated or \
    mode=assigned: the entropy device cannot act for a disk in another process";
const FOREIGN: &str = "--inject-dma foreign requires --iommu virtio or --iommu pviommu";
const NO_RNG: &str =
    "--inject-dma foreign requires --rng, the device that accesses the disk's buffers";
const DMAS: &str = "--record-dmas requires --disk mode=emulated: the IOMMU of this process does \
    not see the DMAs of another disk";
const REVOKED: &str = "--inject-dma after-revoke requires --disk mode=sandbox";
const KEPT: &str =
    "--inject-dma keep-reading requires --disk bus=virtio, and mode=emulated or mode=assigned";
const LOCKED: &str = "--lock mapped requires a guest with --iommu pviommu";
const LIMITS: &str = "--max-mappings, --max-domains and --max-tables limit the virtio-iommu: \
    remove them, or choose --iommu virtio";
const IOTLB: &str = "--max-iotlb has to be at least 1024: a vhost-user back-end keeps the \
    translations of its longest access";

/// Returns the message that refuses an option on its own.
fn alone(name: &str) -> Option<&'static str> {
    match name {
        "inject-dma after-revoke" => Some(REVOKED),
        "inject-dma foreign" => Some(NO_RNG),
        "lock=mapped" => Some(LOCKED),
        _ => None,
    }
}

/// Messages that refuse pairs of options, in either order; `*` matches any end of a name.
const PAIRS: [(&str, &str, &str); 10] = [
    ("bus=nvme", "mode=sandbox", NVME),
    ("bus=nvme", "inject-dma keep-reading", KEPT),
    ("mode=sandbox", "inject-dma keep-reading", KEPT),
    ("iommu=none", "mode=sandbox", SANDBOX),
    ("inject-dma foreign", "mode=sandbox", FOREIGN_SANDBOX),
    ("iommu=virtio, dmas", "mode=sandbox", DMAS),
    ("iommu=virtio, dmas", "mode=assigned*", DMAS),
    ("iommu=pviommu*", "max-mappings", LIMITS),
    ("iommu=pviommu*", "max-domains", LIMITS),
    ("iommu=pviommu*", "max-tables", LIMITS),
];

/// Pairs of options that are valid together, though one alone is refused.
const MENDED: [(&str, &str); 3] = [
    ("iommu=pviommu*", "lock=mapped"),
    ("mode=sandbox", "inject-dma after-revoke"),
    ("rng", "inject-dma foreign"),
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

/// Returns true if the two options choose the same thing.
fn exclusive(a: &str, b: &str) -> bool {
    let chosen = |name: &'_ str| name.split_once('=').map(|(option, _)| option.to_owned());
    a != b && chosen(a).is_some() && chosen(a) == chosen(b)
}

fn options(settings: &[&Setting], dir: &Path) -> DeviceOptions {
    let mut devices = VfioUserDevices {
        disk: Some(Disk::new("disk.img")),
        ..VfioUserDevices::default()
    };
    let mut limits = GuestLimits::default();
    for (_, set) in settings {
        set(&mut devices, &mut limits);
    }
    let here = |path: &mut PathBuf| *path = dir.join(&*path);
    if let Some(disk) = devices.disk.as_mut() {
        here(&mut disk.path);
    }
    devices.memory.file.as_mut().map(here);
    if let Iommu::Virtio { requests, dmas } = &mut devices.iommu {
        requests.as_mut().map(here);
        dmas.as_mut().map(here);
    }
    if let Some(net) = &mut devices.net {
        let path = dir.join("net.peer");
        net.link = format!("socket={}", path.display()).parse().unwrap();
    }
    DeviceOptions {
        limits,
        ..devices.into()
    }
}

/// Asserts that the devices are served, or refused for the reason `why`.
fn started(dir: &Path, options: &DeviceOptions, why: Option<&str>, name: &str) {
    let log: Log = Arc::new(|_, _| ());
    assert_eq!(options.check().err(), why, "{name}");
    match (Daemon::start(dir, options, &log), why) {
        (Ok(mut daemon), None) => {
            assert!(daemon.qemu_args_mut().device_arguments().is_ok());
            daemon.stopper().stop();
            daemon.join().unwrap();
        }
        (Err((_, error)), Some(why)) => assert_eq!(error.to_string(), why),
        (started, why) => panic!("{name}: {started:?}, {why:?}"),
    }
}

fn dir() -> PathBuf {
    let dir = tempfile::tempdir().unwrap().keep();
    fs::write(dir.join("disk.img"), [0; 4096]).unwrap();
    dir
}

#[test]
fn every_pair_is_served_or_refused_with_its_reason() {
    let dir = dir();
    let (mut served, mut refused) = (0, 0);
    for (at, a) in SETTINGS.iter().enumerate() {
        for b in &SETTINGS[at..] {
            if exclusive(a.0, b.0) {
                continue;
            }
            let why = expected(a.0, b.0);
            *(if why.is_none() {
                &mut served
            } else {
                &mut refused
            }) += 1;
            let name = format!("{} {}", a.0, b.0);
            started(&dir, &options(&[a, b], &dir), why, &name);
        }
    }
    println!("{served} pairs served, {refused} refused");
    assert!(served > 200 && refused > 50, "{served} {refused}");
    let setting = |name| SETTINGS.iter().find(|(other, _)| *other == name).unwrap();
    // For each kind of device.
    for kind in ["mode=assigned", "mode=sandbox", "net"] {
        let these = ["iommu=pviommu, host-page-pool", kind].map(setting);
        started(&dir, &options(&these, &dir), None, kind);
    }
    fs::remove_dir_all(&dir).unwrap();
}

/// Every option of a vhost-user disk, alone and beside each limit.
#[test]
fn a_vhost_user_disk_is_served_or_refused_with_its_reason() {
    let dir = dir();
    let stray = InjectedDma::Stray(Iova::new(0xdead_0000));
    for iommu in [QemuIommu::Intel, QemuIommu::Virtio] {
        for (inject_dma, why) in [
            (vec![], None),
            (vec![stray, InjectedDma::AfterUnmap], None),
            (vec![InjectedDma::Foreign], Some(FOREIGN)),
            (vec![InjectedDma::AfterRevoke], Some(REVOKED)),
        ] {
            for read_only in [false, true] {
                let path = dir.join("disk.img");
                let disk = VhostUserDisk {
                    iommu,
                    path,
                    read_only,
                    inject_dma: inject_dma.clone(),
                };
                let mut options = DeviceOptions::from(disk);
                for (name, set) in SETTINGS.iter().filter(|(name, _)| is(name, "max-*")) {
                    set(&mut VfioUserDevices::default(), &mut options.limits);
                    started(&dir, &options, why, name);
                    options.limits = GuestLimits::default();
                }
                options.limits.iotlb_pages = 1023;
                started(&dir, &options, Some(IOTLB), "1023");
            }
        }
    }
    fs::remove_dir_all(&dir).unwrap();
}
