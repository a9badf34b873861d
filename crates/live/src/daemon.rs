//! The devices of one guest, each with its own socket and thread, and a further thread that serves
//! their counters.

mod attach;
mod disk;
mod dma_path;
mod local_config;
mod mac;
mod nvme_disk;
mod offer;
mod options;
mod paused;
mod rebuild;
mod sandboxed_disk;
mod saved_transport;
mod take_over;
mod threads;

pub use local_config::LocalConfig;
pub use offer::HandOverOffer;
pub use rebuild::RestoredDevices;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

use self::attach::RecordPaths;
use self::mac::random_mac;
use self::offer::{OfferSockets, OfferState};
use self::paused::PausedDevice;
use self::threads::Threads;
use crate::access::SocketAccess;
use crate::confine;
use crate::counters::{DeviceCounters, prometheus};
use crate::handover::{HandOverFunction, PauseHandle, StateError};
use crate::iommu::GuestIommu;
use crate::limits::{BoundedLog, GuestLimits};
use crate::link;
use crate::memory::{Locked, MemoryRules};
use crate::qemu::{PciSlot, QemuArgs};
use crate::server::{ClientSlot, ServeEvent, StopSignal, serve_text};
use crate::virtio::net::Net;
use crate::virtio::rng::Rng;

pub use options::{
    DeviceOptions, Disk, DiskBus, DiskMode, GuestDevices, Iommu, NetOptions, VfioUserDevices,
    VhostUserDisk,
};

/// Receives log lines: the name of a device, and an event.
pub type Log = Arc<dyn Fn(&str, &ServeEvent<'_>) + Send + Sync>;

/// A device's name and its counters.
type NamedCounters = (&'static str, Arc<DeviceCounters>);

/// Raises the soft limit on descriptors to the hard limit. A client uses one descriptor for each
/// memory range that it shares, up to [`MAX_RANGES`](crate::MAX_RANGES). The usual limit is about
/// that many, so one client could starve the clients of other devices.
pub fn use_all_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Without a higher limit, clients wait until others disconnect.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// A process that serves the devices of one guest.
#[derive(Debug)]
pub struct Daemon {
    machine: QemuArgs,
    /// Rules for the memory that clients share.
    rules: MemoryRules,
    stop: StopSignal,
    threads: Threads,
    /// Sockets and the memory file, which the daemon removes at its end.
    paths_to_remove: Vec<PathBuf>,
    counters: Vec<NamedCounters>,
    /// Pause handles of the devices.
    pause_handles: Vec<(&'static str, PauseHandle)>,
    /// Devices whose threads are not started yet.
    paused: Vec<PausedDevice>,
    offer: OfferState,
    /// Largest size in bytes of a file that the devices write.
    file_bytes: u64,
    /// True once another process has taken over the devices.
    handed_over: Arc<AtomicBool>,
}

/// Reason why the devices are no longer served here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The stop signal was sent.
    Stopped,
    /// Another process has taken over the devices.
    HandedOver,
}

const IOMMU_SLOT: PciSlot = PciSlot(3);
const BLK: (PciSlot, &str) = (PciSlot(4), "blk");
const NET: (PciSlot, &str) = (PciSlot(5), "net");
const RNG: (PciSlot, &str) = (PciSlot(6), "rng");
/// Name of the socket that serves the counters.
pub const METRICS: &str = "metrics.sock";
const MEMORY_MIB: u32 = 512;

impl Daemon {
    /// Listens in `dir` and starts the threads that serve the devices. [`stopper`](Self::stopper)
    /// stops them.
    ///
    /// # Errors
    /// The options or the permissions of the directory are invalid; the disk could not be opened;
    /// or an IOMMU, a socket, the memory file, a record, the network link or a thread could not be
    /// created. The error names the path. No thread runs, and no socket or memory file remains.
    pub fn start(
        dir: &Path,
        options: &DeviceOptions,
        log: &Log,
    ) -> Result<Self, (PathBuf, io::Error)> {
        let at = at(dir);
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        options.check().map_err(invalid).map_err(&at)?;
        let dir = options.access.check_directory(dir).map_err(&at)?;
        let mut daemon = Self::without_devices(&dir, log).map_err(&at)?;
        match daemon.attach_and_launch(options, log) {
            Ok(()) => Ok(daemon),
            Err(error) => {
                daemon.abandon();
                Err(error)
            }
        }
    }

    /// Ends the threads that have started, and removes the sockets and the memory file.
    fn abandon(self) {
        self.stop.stop();
        // The caller reports why the start failed.
        let _ = self.join();
    }

    fn attach_and_launch(
        &mut self,
        options: &DeviceOptions,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        self.machine.access = options.access;
        self.file_bytes = options.limits.record_bytes;
        match &options.devices {
            GuestDevices::VfioUser(devices) => self.attach_all(devices, &options.limits, log)?,
            GuestDevices::VhostUser(disk) => self.back_end(BLK, disk, &options.limits, log)?,
        }
        self.listen_metrics()?;
        self.launch().map_err(at(&self.machine.dir))
    }

    /// Attaches the devices that QEMU reaches through vfio-user.
    fn attach_all(
        &mut self,
        devices: &VfioUserDevices,
        limits: &GuestLimits,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        self.rules = devices.memory.clone();
        if let Some(path) = &devices.memory.file {
            self.make_memory(path).map_err(at(path))?;
        }
        let iommu = match &devices.iommu {
            Iommu::None => None,
            Iommu::Virtio { requests, dmas } => {
                let records = RecordPaths {
                    requests: requests.as_deref(),
                    dmas: dmas.as_deref(),
                };
                let iommu = self.attach_iommu(records, limits, log)?;
                Some(GuestIommu::Virtio(iommu))
            }
            Iommu::Pviommu {
                host_page_pool,
                inject_reply,
            } => {
                let iommu = self.attach_pviommu(devices, *host_page_pool, *inject_reply, log)?;
                Some(GuestIommu::Para(iommu))
            }
            Iommu::Ring => Some(GuestIommu::Ring(self.attach_ring(devices, log)?)),
        };
        if devices.entropy {
            let counters = self.add_counters(RNG.1);
            self.attach(
                RNG,
                Rng::new(Arc::clone(&counters)),
                iommu.as_ref(),
                counters,
                log,
            )?;
        }
        if let Some(options) = &devices.net {
            let counters = self.add_counters(NET.1);
            let link = link::open(&options.link).map_err(at(options.link.path()))?;
            self.paths_to_remove.extend(link.name());
            let mac = options.mac.unwrap_or_else(random_mac);
            let net = Net::new(link, mac, options.pairs, Arc::clone(&counters));
            self.attach(NET, net, iommu.as_ref(), counters, log)?;
        }
        if let Some(disk) = &devices.disk {
            self.attach_disk(disk, limits, iommu.as_ref(), log)?;
        }
        Ok(())
    }

    fn without_devices(dir: &Path, log: &Log) -> io::Result<Self> {
        Ok(Self {
            machine: QemuArgs {
                dir: dir.to_owned(),
                access: SocketAccess::OwnUser,
                memory_file: None,
                iommu: None,
                qemu_iommu: None,
                devices: Vec::new(),
                memory: MEMORY_MIB,
                processors: 1,
                icount: false,
                extra: Vec::new(),
            },
            rules: MemoryRules::default(),
            stop: StopSignal::new()?,
            threads: Threads::new(log),
            paths_to_remove: Vec::new(),
            counters: Vec::new(),
            pause_handles: Vec::new(),
            paused: Vec::new(),
            offer: OfferState::default(),
            file_bytes: 0,
            handed_over: Arc::default(),
        })
    }

    /// Creates the file for the guest's memory. The file must not exist, so it holds no data of
    /// another guest; the daemon removes it at its end.
    fn make_memory(&mut self, path: &Path) -> io::Result<()> {
        let mut file = File::options();
        file.write(true).create_new(true).mode(0o600).open(path)?;
        self.paths_to_remove.push(path.to_owned());
        self.machine.access.share(path)?;
        self.machine.memory_file = Some(path.to_owned());
        Ok(())
    }

    fn add_counters(&mut self, name: &'static str) -> Arc<DeviceCounters> {
        let counters = Arc::new(DeviceCounters::default());
        self.counters.push((name, Arc::clone(&counters)));
        counters
    }

    /// Creates a listener at `path`. The daemon removes the path at its end.
    fn listen(
        &mut self,
        path: &Path,
        access: SocketAccess,
    ) -> Result<UnixListener, (PathBuf, io::Error)> {
        let listener = access.listen(path);
        let listener = listener.map_err(|error| (path.to_owned(), error))?;
        self.paths_to_remove.push(path.to_owned());
        Ok(listener)
    }

    /// Prepares a thread that serves the device.
    fn prepare<F: HandOverFunction + Send + 'static>(
        &mut self,
        name: &'static str,
        slot: ClientSlot<F>,
        counters: Arc<DeviceCounters>,
        log: &Log,
    ) -> Result<(), StateError> {
        let pause = PauseHandle::new()?;
        self.pause_handles.push((name, pause.clone()));
        let (stop, log) = (self.stop.clone(), Arc::clone(log));
        let paused = PausedDevice::new(name, slot, pause, counters, stop, log);
        self.paused.push(paused);
        Ok(())
    }

    /// Starts the threads of all prepared devices.
    ///
    /// # Errors
    /// A thread could not be started; the caller must [`abandon`](Self::abandon) the daemon.
    fn launch(&mut self) -> io::Result<()> {
        let kept = match self.rules.locked {
            Locked::Nothing => CapabilitySet::empty(),
            _ => confine::allow_locking(),
        };
        let prepared = confine::prepare();
        let paused = std::mem::take(&mut self.paused);
        for paused in paused {
            self.threads.spawn(paused.name(), move || {
                confine::serving_thread(prepared, kept)?;
                paused.serve()
            })?;
        }
        if let Some(OfferSockets { metrics, .. }) = self.offer.sockets() {
            let metrics = Arc::clone(metrics);
            let (stop, counters) = (self.stop.clone(), self.counters.clone());
            self.threads.spawn(METRICS, move || {
                confine::serving_thread(prepared, CapabilitySet::empty())?;
                serve_text(&metrics, SocketAccess::OwnUser, &stop, || text(&counters))
            })?;
        }
        Ok(())
    }

    fn listen_metrics(&mut self) -> Result<(), (PathBuf, io::Error)> {
        let path = self.machine.dir.join(METRICS);
        self.offer = OfferState::Possible(OfferSockets {
            metrics: Arc::new(self.listen(&path, SocketAccess::OwnUser)?),
            control: None,
        });
        Ok(())
    }

    /// Returns the QEMU arguments, for changes before the start of QEMU.
    pub fn qemu_args_mut(&mut self) -> &mut QemuArgs {
        &mut self.machine
    }

    /// Returns the current counters in Prometheus' text format. `metrics.sock` serves the same
    /// text.
    pub fn metrics(&self) -> String {
        text(&self.counters)
    }

    /// Waits until every thread has ended. A thread ends after [`StopSignal::stop`], a hand-over or
    /// an error of its own.
    ///
    /// # Errors
    /// The first error of a thread, in the order of their ends. The log has had each error since
    /// the thread ended. The other threads continue until the stop.
    pub fn join(self) -> io::Result<EndReason> {
        let result = self.threads.join();
        // The sockets now belong to the other process.
        if self.handed_over.load(Ordering::Acquire) {
            return result.map(|()| EndReason::HandedOver);
        }
        remove_files(&self.paths_to_remove);
        result.map(|()| EndReason::Stopped)
    }

    /// Confines the calling thread, which from then on only waits for the others and removes the
    /// sockets. See [`serving_process`](confine::serving_process).
    ///
    /// # Errors
    /// The kernel refused.
    pub fn confine(&self) -> io::Result<()> {
        confine::serving_process(self.file_bytes)
    }

    /// Returns the signal that stops the daemon.
    pub fn stopper(&self) -> StopSignal {
        self.stop.clone()
    }
}

fn remove_files(paths: &[PathBuf]) {
    for path in paths {
        let _ = fs::remove_file(path);
    }
}

/// Adds a path to an error.
fn at(path: &Path) -> impl Fn(io::Error) -> (PathBuf, io::Error) {
    let path = path.to_owned();
    move |error| (path.clone(), error)
}

fn bounded_log(name: &'static str, log: &Log) -> BoundedLog {
    let log = Arc::clone(log);
    BoundedLog::new(move |refused| log(name, &ServeEvent::Refused(refused)))
}

/// Formats the counters as Prometheus text.
fn text(counters: &[NamedCounters]) -> String {
    let counters: Vec<_> = counters.iter().map(|(name, c)| (*name, &**c)).collect();
    prometheus(&counters)
}
