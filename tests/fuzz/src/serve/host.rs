//! The daemon of one input.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use ringfence_live::daemon::{
    Daemon, DeviceOptions, Disk, DiskBus, DiskMode, EndReason, Iommu, Log, NetOptions,
    VfioUserDevices, VhostUserDisk,
};
use ringfence_live::handover::HandOverTimeouts;
use ringfence_live::link::Address;
use ringfence_live::qemu::QemuIommu;
use ringfence_live::sandbox::{SandboxProgram, run_sandboxed_device};
use ringfence_live::server::ServeEvent;
use tempfile::TempDir;

use super::Socket;
use super::client::{Client, Exchange, PATIENCE};
use crate::OutcomeHook;
use crate::vfio_user::DISK_BYTES;

/// Argument with which the disk's process is started.
pub const SANDBOX_ARGUMENT: &str = "sandboxed-device";
/// Longest wait for a request that may never complete.
const SHORT: Duration = Duration::from_millis(200);

/// The executable of the disk's process.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

thread_local! {
    static DIRECTORY: RefCell<TempDir> = RefCell::new(tempfile::tempdir().expect("a directory"));
}

/// Sets the executable of the disk's process. Without a call it is the running one.
pub fn set_program(path: &Path) {
    let _ = PROGRAM.set(path.to_owned());
}

/// Serves the disk and exits if this process was started for that. An executable must call it
/// first.
pub fn run_if_sandboxed() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next() == Some(OsString::from(SANDBOX_ARGUMENT)) {
        let code = i32::from(run_sandboxed_device().is_err());
        std::process::exit(code);
    }
}

/// Devices of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setup {
    /// All devices in one process, behind a virtio-iommu.
    Virtio,
    /// The disk in a sandbox process, behind a virtio-iommu.
    Sandbox,
    /// The disk in a sandbox process, behind the para-virtual IOMMU.
    Para,
    /// The disk as a vhost-user back-end.
    VhostUser,
    /// The disk with an NVMe interface, without an IOMMU.
    Nvme,
}

impl Setup {
    pub(super) fn of(byte: u8) -> Self {
        let all = [
            Self::Virtio,
            Self::Sandbox,
            Self::Para,
            Self::VhostUser,
            Self::Nvme,
        ];
        all[usize::from(byte) % all.len()]
    }

    fn options(self, directory: &Path) -> DeviceOptions {
        let image = directory.join("image");
        if self == Self::VhostUser {
            let disk = VhostUserDisk {
                iommu: QemuIommu::Virtio,
                path: image,
                read_only: false,
                inject_dma: Vec::new(),
            };
            return disk.into();
        }
        let program = PROGRAM.get().cloned();
        let sandbox = SandboxProgram {
            path: program.unwrap_or_else(|| "/proc/self/exe".into()),
            arguments: vec![SANDBOX_ARGUMENT.into()],
        };
        let mut disk = Disk::new(image);
        match self {
            Self::Virtio => {}
            Self::Nvme => disk.bus = DiskBus::Nvme,
            _ => disk.mode = DiskMode::Sandbox(sandbox),
        }
        let devices = VfioUserDevices {
            iommu: match self {
                Self::Para => Iommu::PVIOMMU,
                Self::Nvme => Iommu::None,
                _ => Iommu::default(),
            },
            disk: Some(disk),
            net: Some(NetOptions {
                link: Address::Stream(directory.join("link")),
                pairs: NonZeroU16::MIN,
                mac: Some([2; 6]),
            }),
            ..VfioUserDevices::default()
        };
        devices.into()
    }
}

/// A running daemon.
pub(super) struct Host {
    setup: Setup,
    daemon: Daemon,
    directory: PathBuf,
    /// Other end of the network.
    peer: Option<UnixStream>,
    /// True once the daemon has ended the disk's process.
    ended: Arc<AtomicBool>,
}

impl Host {
    pub(super) fn start(setup: Setup) -> Self {
        let directory = DIRECTORY.with_borrow(|directory| directory.path().join("run"));
        fs::create_dir(&directory).expect("a new directory");
        let image = File::create(directory.join("image")).expect("an image");
        image.set_len(DISK_BYTES).expect("its size");
        let ended = Arc::new(AtomicBool::new(false));
        let process_ended = Arc::clone(&ended);
        let log: Log = Arc::new(move |_: &str, event: &ServeEvent<'_>| match event {
            ServeEvent::Refused(error) | ServeEvent::Closed(error) => {
                let text = error.to_string();
                assert!(!text.contains(char::is_control), "{text:?}");
            }
            ServeEvent::Ended(_) => process_ended.store(true, Ordering::Release),
            _ => {}
        });
        let options = setup.options(&directory);
        let mut daemon = Daemon::start(&directory, &options, &log).expect("a daemon");
        let limits = HandOverTimeouts::default();
        daemon.offer_hand_over(limits, &log).expect("a hand-over");
        Self {
            setup,
            daemon,
            directory,
            peer: None,
            ended,
        }
    }

    /// Returns the sockets that answer clients.
    pub(super) fn sockets(&self) -> Vec<Socket> {
        use Socket::{Disk, Iommu, Metrics, Net};
        match self.setup {
            Setup::VhostUser => vec![Disk, Metrics],
            Setup::Nvme => vec![Disk, Net, Metrics],
            _ => vec![Disk, Net, Iommu, Metrics],
        }
    }

    fn path(&self, socket: Socket) -> PathBuf {
        self.directory.join(match socket {
            Socket::Disk => "blk.sock",
            Socket::Net => "net.sock",
            Socket::Iommu if self.setup == Setup::Para => "pviommu.sock",
            Socket::Iommu => "iommu.sock",
            Socket::Control => "control.sock",
            Socket::Metrics => "metrics.sock",
        })
    }

    /// Connects to a socket. `None` if the daemon has no such socket.
    pub(super) fn connect(&self, socket: Socket) -> Option<Client> {
        Client::connect(&self.path(socket))
    }

    /// The other end of the network sends bytes; it drops them if the daemon does not read them.
    pub(super) fn send_frames(&mut self, bytes: &[u8]) {
        let path = self.directory.join("link");
        let peer = self.peer.get_or_insert_with(|| {
            let peer = UnixStream::connect(path).expect("the link");
            peer.set_nonblocking(true).expect("no waiting");
            peer
        });
        if peer.write_all(bytes).is_err() {
            self.peer = None;
        }
    }

    fn counter(&self, device: &str, name: &str) -> u64 {
        let metrics = self.daemon.metrics();
        let start = format!("ringfence_{name}_total{{device=\"{device}\"}} ");
        let value = metrics.lines().find_map(|line| line.strip_prefix(&start));
        value.map_or(0, |value| value.parse().expect("a number"))
    }

    fn completed(&self) -> u64 {
        let failed = self.counter("blk", "failed") + self.counter("blk", "malformed");
        self.counter("blk", "requests").saturating_sub(failed)
    }

    /// Waits until a device has taken another request or frame, or has faulted, for at most
    /// [`SHORT`].
    pub(super) fn await_progress(&self) {
        let count = || {
            ["blk", "net", "iommu", "pviommu"]
                .iter()
                .map(|device| {
                    ["requests", "faults", "frames_received"]
                        .iter()
                        .map(|name| self.counter(device, name))
                        .sum::<u64>()
                })
                .sum::<u64>()
        };
        let (before, begun) = (count(), Instant::now());
        while count() == before && begun.elapsed() < SHORT {
            thread::yield_now();
        }
    }

    /// Connects as a sound client and requires an answer.
    pub(super) fn expect_answer(&self, socket: Socket) {
        let mut client = self.connect(socket).expect("a socket");
        match (self.setup, socket) {
            (_, Socket::Metrics) => assert!(client.drain(), "no metrics"),
            (Setup::VhostUser, _) => {
                // GET_FEATURES, version 1, no payload.
                let request = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
                assert_eq!(client.exchange(&request, &[], false), Exchange::Sent);
                assert!(client.fill(&mut [0; 20]), "{socket:?} does not answer");
            }
            _ => {
                let mut version = vec![7, 0, 1, 0, 23, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
                version.extend(*b"\0\0\0\0{}\0");
                let answer = client.exchange(&version, &[], true);
                let expected = Exchange::Answered { refused: false };
                assert_eq!(answer, expected, "{socket:?} does not answer");
            }
        }
    }

    /// Reports the outcomes of the devices.
    pub(super) fn tell(&self, reached: OutcomeHook<'_>) {
        let served = self.completed() > 0;
        let faults = self.counter("iommu", "faults") + self.counter("pviommu", "faults") > 0;
        for (outcome, setup, holds) in [
            ("virtio: disk served", Setup::Virtio, served),
            ("sandbox: disk served", Setup::Sandbox, served),
            ("sandbox: fault", Setup::Sandbox, faults),
            ("para: disk served", Setup::Para, served),
            ("para: fault", Setup::Para, faults),
            ("nvme: disk served", Setup::Nvme, served),
        ] {
            if holds && self.setup == setup {
                reached(outcome);
            }
        }
        if self.counter("net", "frames_received") > 0 {
            reached("frame received");
        }
    }

    /// Stops the daemon. All its threads must end, and only the image may stay.
    pub(super) fn stop(self) {
        assert!(
            !self.ended.load(Ordering::Acquire),
            "the daemon ended an honest process"
        );
        self.daemon.stopper().stop();
        let ended = self.daemon.join().expect("no thread failed");
        assert_eq!(ended, EndReason::Stopped);
        drop(self.peer);
        fs::remove_file(self.directory.join("image")).expect("the image");
        fs::remove_dir(&self.directory).expect("nothing else is left");
    }
}

/// Descriptors, threads and child processes of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Resources {
    /// Targets of the descriptors, sorted.
    descriptors: Vec<String>,
    threads: usize,
    children: usize,
}

impl Resources {
    pub(super) fn now() -> Self {
        let threads = fs::read_dir("/proc/self/task").expect("threads").count();
        let children = fs::read_dir("/proc/self/task")
            .expect("threads")
            .filter_map(|thread| {
                let mut text = String::new();
                let path = thread.ok()?.path().join("children");
                File::open(path).ok()?.read_to_string(&mut text).ok()?;
                Some(text.split_whitespace().count())
            });
        Self {
            children: children.sum(),
            descriptors: open_files(),
            threads,
        }
    }

    /// Waits until there are no more of them than before.
    pub(super) fn expect_no_more(self) {
        let begun = Instant::now();
        loop {
            let now = Self::now();
            let more = now.descriptors.len() > self.descriptors.len()
                || now.threads > self.threads
                || now.children > self.children;
            if !more {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{now:#?} after {self:#?}");
            thread::yield_now();
        }
    }
}

/// Returns what the descriptors of this process refer to.
fn open_files() -> Vec<String> {
    let all = fs::read_dir("/proc/self/fd").expect("descriptors");
    let links = all.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let mut links: Vec<_> = links.map(|path| path.display().to_string()).collect();
    links.sort();
    links
}
