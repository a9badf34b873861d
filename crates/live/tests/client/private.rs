//! Files that a daemon creates in its directory, and those that remain when it cannot start.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringfence_live::MemoryRules;
use ringfence_live::access::SocketAccess;
use ringfence_live::daemon::{
    Daemon, DeviceOptions, Disk, GuestDevices, HandOverOffer, Log, VfioUserDevices, VhostUserDisk,
};
use ringfence_live::handover::HandOverTimeouts;
use ringfence_live::qemu::QemuIommu;

use crate::rig::DISK_SECTORS;

struct Dir(PathBuf, #[allow(dead_code)] tempfile::TempDir);

impl Dir {
    fn new(name: &str) -> Self {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join(name);
        SocketAccess::OwnUser.make_directory(&path).unwrap();
        Self(path, parent)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    fn disk(&self) -> PathBuf {
        let path = self.0.join("disk.img");
        fs::write(&path, vec![0; (DISK_SECTORS * 512) as usize]).unwrap();
        path
    }
}

fn log() -> Log {
    Arc::new(|_, _| ())
}

fn devices(disk: impl Into<PathBuf>, entropy: bool) -> DeviceOptions {
    let devices = VfioUserDevices {
        disk: Some(Disk::new(disk)),
        entropy,
        ..VfioUserDevices::default()
    };
    devices.into()
}

fn refused(dir: &Path, devices: &DeviceOptions) -> String {
    let (path, error) = Daemon::start(dir, devices, &log()).unwrap_err();
    format!("{}: {error}", path.display())
}

#[test]
fn a_hand_over_is_offered_once() {
    let dir = Dir::new("once");
    let mut daemon = Daemon::start(&dir.0, &devices(dir.disk(), true), &log()).unwrap();
    for wanted in [HandOverOffer::Offered, HandOverOffer::AlreadyOffered] {
        let offered = daemon.offer_hand_over(HandOverTimeouts::default(), &log());
        assert_eq!(offered.unwrap(), wanted);
    }
    daemon.stopper().stop();
    daemon.join().unwrap();
}

#[test]
fn a_hand_over_can_be_offered_after_an_offer_that_failed() {
    let dir = Dir::new("again");
    let mut daemon = Daemon::start(&dir.0, &devices(dir.disk(), true), &log()).unwrap();
    let control = dir.0.join("control.sock");
    fs::write(&control, "precious").unwrap();
    let mut offer = || daemon.offer_hand_over(HandOverTimeouts::default(), &log());
    offer().unwrap_err();
    fs::remove_file(&control).unwrap();
    assert_eq!(offer().unwrap(), HandOverOffer::Offered);
    daemon.stopper().stop();
    daemon.join().unwrap();
}

#[test]
fn no_hand_over_is_offered_if_qemu_translates() {
    let dir = Dir::new("qemu");
    let disk = VhostUserDisk {
        iommu: QemuIommu::Intel,
        path: dir.disk(),
        read_only: false,
        inject_dma: Vec::new(),
    };
    let options = DeviceOptions {
        devices: GuestDevices::VhostUser(disk),
        ..devices("", false)
    };
    let mut daemon = Daemon::start(&dir.0, &options, &log()).unwrap();
    let offered = daemon.offer_hand_over(HandOverTimeouts::default(), &log());
    assert_eq!(offered.unwrap(), HandOverOffer::QemuTranslates);
    assert!(!dir.names().contains(&"control.sock".to_owned()));
    daemon.stopper().stop();
    daemon.join().unwrap();
}

#[test]
fn files_are_private_to_the_user() {
    let dir = Dir::new("modes");
    let mut daemon = Daemon::start(&dir.0, &devices(dir.disk(), true), &log()).unwrap();
    daemon
        .offer_hand_over(HandOverTimeouts::default(), &log())
        .unwrap();
    daemon.qemu_args_mut().device_arguments().unwrap();
    let mut made = dir.names();
    made.retain(|name| name != "disk.img");
    assert_eq!(
        made,
        [
            "blk.sock",
            "control.sock",
            "iommu.sock",
            "metrics.sock",
            "rng.sock",
            "viot.bin"
        ]
    );
    for name in made {
        let mode = fs::metadata(dir.0.join(&name)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    daemon.stopper().stop();
    daemon.join().unwrap();
    assert_eq!(dir.names(), ["disk.img", "viot.bin"]);
}

#[test]
fn a_daemon_that_cannot_begin_leaves_nothing() {
    let dir = Dir::new("fails");
    let disk = dir.disk();
    for name in ["rng", "blk", "metrics"] {
        let socket = dir.0.join(format!("{name}.sock"));
        fs::write(&socket, "precious").unwrap();
        let said = refused(&dir.0, &devices(&disk, true));
        assert!(said.contains("is not a socket"), "{said}");
        assert_eq!(fs::read(&socket).unwrap(), b"precious", "{name}");
        fs::remove_file(&socket).unwrap();
        assert_eq!(dir.names(), ["disk.img"], "{name}");
    }
}

#[test]
fn a_directory_that_others_can_write_to_is_refused() {
    let dir = Dir::new("others");
    fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o733)).unwrap();
    let said = refused(&dir.0, &DeviceOptions::default());
    assert!(said.contains("chmod go-w"), "{said}");
    assert_eq!(dir.names(), [""; 0]);
}

#[test]
fn non_disk_files_are_rejected() {
    let dir = Dir::new("disks");
    let short = dir.0.join("short");
    for (bytes, said) in [
        ("", "the disk has 0 bytes"),
        ("511 bytes", "the disk has 9 bytes"),
    ] {
        fs::write(&short, bytes).unwrap();
        let error = refused(&dir.0, &devices(&short, false));
        assert!(error.contains(said), "{error}");
    }
    for path in ["/dev/zero", "/dev/null"] {
        let error = refused(&dir.0, &devices(path, false));
        assert!(
            error.starts_with(path) && error.contains("regular file or a block device"),
            "{error}"
        );
    }
}

/// The kernel has no room for a stack of 1 EiB.
#[test]
fn a_thread_that_cannot_start_is_an_error() {
    let mut process = crate::process_of("private::without_threads");
    process.arg("--test-threads=1").env(crate::ALONE, "1");
    crate::passes(process.env("RUST_MIN_STACK", (1u64 << 60).to_string()));
}

/// Runs in its own process, whose threads need a large stack.
#[test]
#[ignore = "started by another test"]
fn without_threads() {
    if !crate::is_alone() {
        return;
    }
    let dir = Dir::new("threads");
    let memory = MemoryRules {
        file: Some(dir.0.join("memory")),
        ..MemoryRules::default()
    };
    let vfio_user = VfioUserDevices {
        disk: Some(Disk::new(dir.disk())),
        memory,
        ..VfioUserDevices::default()
    };
    let vhost_user = VhostUserDisk {
        iommu: QemuIommu::Intel,
        path: dir.disk(),
        read_only: false,
        inject_dma: Vec::new(),
    };
    let vhost_user = DeviceOptions {
        devices: GuestDevices::VhostUser(vhost_user),
        ..devices("", false)
    };
    for options in [vfio_user.into(), vhost_user] {
        let told = refused(&dir.0, &options);
        let path = dir.0.display();
        assert!(
            told.starts_with(&format!("{path}: cannot start thread ")),
            "{told}"
        );
        assert_eq!(dir.names(), ["disk.img"]);
    }
}
