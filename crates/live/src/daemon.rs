//! The devices of one guest, each with its own socket and thread, and a further thread that serves
//! their counters.

mod attach;
mod disk;
mod dma_path;
mod local_config;
mod mac;
mod options;
mod paused;
mod rebuild;
mod sandboxed_disk;
mod take_over;

pub use local_config::LocalConfig;
pub use rebuild::RestoredDevices;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

use self::attach::RecordPaths;
use self::mac::random_mac;
use self::paused::PausedDevice;
use crate::access::SocketAccess;
use crate::confine;
use crate::counters::{DeviceCounters, prometheus};
use crate::handover::{
    CONTROL, HandOverFunction, HandOverSource, HandOverTimeouts, PauseHandle, SourceOutcome,
    StateError, serve_destination,
};
use crate::iommu::GuestIommu;
use crate::limits::{GuestLimits, RateLimitedLog};
use crate::link;
use crate::memory::{Locked, MemoryRules};
use crate::qemu::{PciSlot, QemuArgs};
use crate::server::{ClientSlot, ServeEvent, StopSignal, serve_text};
use crate::virtio::net::Net;
use crate::virtio::rng::Rng;

pub use options::{
    DeviceOptions, Disk, DiskMode, GuestDevices, Iommu, NetOptions, VfioUserDevices, VhostUserDisk,
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
    threads: Vec<JoinHandle<io::Result<()>>>,
    /// Sockets and the memory file, which the daemon removes at its end.
    paths_to_remove: Vec<PathBuf>,
    counters: Vec<NamedCounters>,
    /// Pause handles of the devices.
    pause_handles: Vec<(&'static str, PauseHandle)>,
    /// Devices whose threads are not started yet.
    paused: Vec<PausedDevice>,
    /// The thread that serves the counters and the offer of a hand-over share the listener. `None`
    /// once the devices are offered.
    metrics: Option<Arc<UnixListener>>,
    control: Option<UnixListener>,
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

/// Result of [`Daemon::offer_hand_over`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandOverOffer {
    /// Another process can take over the devices.
    Offered,
    /// An earlier call has offered them. Its timeouts and its log stay in use.
    AlreadyOffered,
    /// QEMU's IOMMU translates for the devices, so they cannot be taken over.
    QemuTranslates,
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
    /// or an IOMMU, a socket, the memory file, a record or the network link could not be created.
    /// The error names the path.
    pub fn start(
        dir: &Path,
        options: &DeviceOptions,
        log: &Log,
    ) -> Result<Self, (PathBuf, io::Error)> {
        let at = at(dir);
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        options.check().map_err(invalid).map_err(&at)?;
        let dir = options.access.check_directory(dir).map_err(&at)?;
        let mut daemon = Self::without_devices(&dir).map_err(&at)?;
        match daemon.attach_and_launch(options, log) {
            Ok(()) => Ok(daemon),
            Err(error) => {
                // Remove the sockets created so far.
                daemon.stop.stop();
                daemon.remove_files();
                Err(error)
            }
        }
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
        self.launch();
        Ok(())
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

    fn without_devices(dir: &Path) -> io::Result<Self> {
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
            threads: Vec::new(),
            paths_to_remove: Vec::new(),
            counters: Vec::new(),
            pause_handles: Vec::new(),
            paused: Vec::new(),
            metrics: None,
            control: None,
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
    fn launch(&mut self) {
        let kept = match self.rules.locked {
            Locked::Nothing => CapabilitySet::empty(),
            _ => confine::allow_locking(),
        };
        let prepared = confine::prepare();
        let paused = std::mem::take(&mut self.paused);
        let threads = paused.into_iter().map(|paused| {
            let confine = move || confine::serving_thread(prepared, kept);
            thread::spawn(move || paused.serve(confine))
        });
        self.threads.extend(threads);
        if let Some(listener) = self.metrics.clone() {
            let (stop, counters) = (self.stop.clone(), self.counters.clone());
            self.threads.push(thread::spawn(move || {
                confine::serving_thread(prepared, CapabilitySet::empty())?;
                serve_text(&listener, SocketAccess::OwnUser, &stop, || text(&counters))
            }));
        }
    }

    fn listen_metrics(&mut self) -> Result<(), (PathBuf, io::Error)> {
        let path = self.machine.dir.join(METRICS);
        self.metrics = Some(Arc::new(self.listen(&path, SocketAccess::OwnUser)?));
        Ok(())
    }

    /// Lets another process of the same user take over the devices, through `control.sock` in the
    /// directory. Devices behind QEMU's IOMMU cannot be taken over.
    ///
    /// # Errors
    /// Listening failed.
    pub fn offer_hand_over(
        &mut self,
        timeouts: HandOverTimeouts,
        log: &Log,
    ) -> io::Result<HandOverOffer> {
        if self.machine.qemu_iommu.is_some() {
            return Ok(HandOverOffer::QemuTranslates);
        }
        let Some(metrics) = self.metrics.clone() else {
            return Ok(HandOverOffer::AlreadyOffered);
        };
        let control = match self.control.take() {
            Some(control) => control,
            None => {
                let path = self.machine.dir.join(CONTROL);
                let listener = self.listen(&path, SocketAccess::OwnUser);
                listener.map_err(|(_, error)| error)?
            }
        };
        // From here on, the devices are offered. After an earlier error, the caller can try again.
        self.metrics = None;
        let offered = HandOverSource {
            control,
            metrics,
            devices: self.pause_handles.clone(),
            limits: timeouts,
        };
        let (stop, handed_over, log) = (
            self.stop.clone(),
            Arc::clone(&self.handed_over),
            Arc::clone(log),
        );
        let prepared = confine::prepare();
        self.threads.push(thread::spawn(move || {
            confine::serving_thread(prepared, CapabilitySet::empty())?;
            let say = |why: &str| log("hand-over", &ServeEvent::Kept(why));
            if serve_destination(offered, &stop, say)? == SourceOutcome::HandedOver {
                handed_over.store(true, Ordering::Release);
            }
            Ok(())
        }));
        Ok(HandOverOffer::Offered)
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
    /// The first error of a thread, in the order of their start. If the thread serves a device, the
    /// log has had the error since the thread ended. The other threads continue until the stop.
    pub fn join(mut self) -> io::Result<EndReason> {
        let mut result = Ok(());
        for thread in self.threads.drain(..) {
            let ended = thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a device thread panicked")));
            if result.is_ok() {
                result = ended;
            }
        }
        // The sockets now belong to the other process.
        if self.handed_over.load(Ordering::Acquire) {
            return result.map(|()| EndReason::HandedOver);
        }
        self.remove_files();
        result.map(|()| EndReason::Stopped)
    }

    fn remove_files(&self) {
        for socket in &self.paths_to_remove {
            let _ = fs::remove_file(socket);
        }
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

/// Adds a path to an error.
fn at(path: &Path) -> impl Fn(io::Error) -> (PathBuf, io::Error) {
    let path = path.to_owned();
    move |error| (path.clone(), error)
}

fn rate_limited_log(name: &'static str, log: &Log) -> RateLimitedLog {
    let log = Arc::clone(log);
    RateLimitedLog::new(move |refused| log(name, &ServeEvent::Refused(refused)))
}

/// Formats the counters as Prometheus text.
fn text(counters: &[NamedCounters]) -> String {
    let counters: Vec<_> = counters.iter().map(|(name, c)| (*name, &**c)).collect();
    prometheus(&counters)
}
