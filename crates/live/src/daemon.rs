//! The devices of one guest, each with its own socket and thread, and a further thread that serves
//! their counters.

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

use ringfence_types::RequesterId;
use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

use self::mac::random_mac;
use self::paused::PausedDevice;
use crate::access::SocketAccess;
use crate::confine;
use crate::counters::{DeviceCounters, prometheus};
use crate::dma::{Direct, Dma};
use crate::handover::{
    CONTROL, HandOverSource, HandOverTimeouts, PauseHandle, SourceOutcome, StateError,
    serve_destination,
};
use crate::host::HostPagePool;
use crate::iommu::{GuestIommu, Recorder, VirtioIommu};
use crate::limits::{GuestLimits, RateLimitedLog};
use crate::link;
use crate::memory::{Locked, MemoryRules};
use crate::pviommu::PvIommu;
use crate::qemu::{IOMMU, PVIOMMU, PciSlot, QemuArgs};
use crate::server::{ClientSlot, ServeEvent, StopSignal, serve_text};
use crate::virtio::iommu::IommuDevice;
use crate::virtio::net::Net;
use crate::virtio::pviommu::{InjectedReply, PvIommuDevice};
use crate::virtio::rng::Rng;
use crate::virtio::{Device, VirtioPci};

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
    sockets: Vec<PathBuf>,
    counters: Vec<NamedCounters>,
    /// Pause handles of the devices.
    pause_handles: Vec<(&'static str, PauseHandle)>,
    /// Devices whose threads are not started yet.
    paused: Vec<PausedDevice>,
    metrics: Option<UnixListener>,
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

const IOMMU_SLOT: PciSlot = PciSlot(3);
const BLK: (PciSlot, &str) = (PciSlot(4), "blk");
const NET: (PciSlot, &str) = (PciSlot(5), "net");
const RNG: (PciSlot, &str) = (PciSlot(6), "rng");
/// Name of the socket that serves the counters.
pub const METRICS: &str = "metrics.sock";
const MEMORY_MIB: u32 = 512;

impl Daemon {
    /// Listens in `dir` and serves until its [`stopper`](Self::stopper) stops it.
    ///
    /// # Errors
    /// Opening the disk or listening failed; the error names the path.
    pub fn start(
        dir: &Path,
        options: &DeviceOptions,
        log: &Log,
    ) -> Result<Self, (PathBuf, io::Error)> {
        let at = at(dir);
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        options.check().map_err(invalid).map_err(&at)?;
        let dir = options.access.check_directory(dir).map_err(&at)?;
        let mut daemon = Self::empty(&dir).map_err(&at)?;
        match daemon.fill(options, log) {
            Ok(()) => Ok(daemon),
            Err(error) => {
                // Remove the sockets created so far.
                daemon.stop.stop();
                daemon.remove_sockets();
                Err(error)
            }
        }
    }

    fn fill(&mut self, options: &DeviceOptions, log: &Log) -> Result<(), (PathBuf, io::Error)> {
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
                let records = [requests.as_deref(), dmas.as_deref()];
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
        };
        if devices.entropy {
            let counters = self.count(RNG.1);
            self.attach(
                RNG,
                Rng::new(Arc::clone(&counters)),
                iommu.as_ref(),
                counters,
                log,
            )?;
        }
        if let Some(options) = &devices.net {
            let counters = self.count(NET.1);
            let link = link::open(&options.link).map_err(at(options.link.path()))?;
            self.sockets.extend(link.name());
            let mac = options.mac.unwrap_or_else(random_mac);
            let net = Net::new(link, mac, options.pairs, Arc::clone(&counters));
            self.attach(NET, net, iommu.as_ref(), counters, log)?;
        }
        if let Some(disk) = &devices.disk {
            self.attach_disk(disk, limits, iommu.as_ref(), log)?;
        }
        Ok(())
    }

    fn empty(dir: &Path) -> io::Result<Self> {
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
            sockets: Vec::new(),
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
        self.sockets.push(path.to_owned());
        self.machine.access.share(path)?;
        self.machine.memory_file = Some(path.to_owned());
        Ok(())
    }

    fn count(&mut self, name: &'static str) -> Arc<DeviceCounters> {
        let counters = Arc::new(DeviceCounters::default());
        self.counters.push((name, Arc::clone(&counters)));
        counters
    }

    /// Listens at `path` until the devices are no longer served.
    fn listen(
        &mut self,
        path: &Path,
        access: SocketAccess,
    ) -> Result<UnixListener, (PathBuf, io::Error)> {
        let listener = access.listen(path);
        let listener = listener.map_err(|error| (path.to_owned(), error))?;
        self.sockets.push(path.to_owned());
        Ok(listener)
    }

    fn attach_iommu(
        &mut self,
        [requests, dmas]: [Option<&Path>; 2],
        limits: &GuestLimits,
        log: &Log,
    ) -> Result<VirtioIommu, (PathBuf, io::Error)> {
        let counters = self.count(IOMMU);
        let iommu = VirtioIommu::with_limits(limits, Arc::clone(&counters))
            .map_err(|e| (self.machine.dir.clone(), e))?;
        let mut device = IommuDevice::new(iommu.clone(), Arc::clone(&counters));
        device.set_log(rate_limited_log(IOMMU, log));
        if let Some(path) = requests {
            let record = Recorder::create(path, limits.record_bytes);
            device.record(record.map_err(at(path))?);
        }
        if let Some(path) = dmas {
            let created = iommu.create_dma_record(path, limits.record_bytes);
            created.map_err(at(path))?;
        }
        let dma = iommu.memory();
        let function = VirtioPci::new(device, dma, false, Arc::clone(&counters));
        self.machine.iommu = Some(IOMMU_SLOT);
        self.listen_for(IOMMU, function, counters, log)?;
        Ok(iommu)
    }

    /// No firmware table describes this IOMMU; its driver recognises its PCI ID.
    fn attach_pviommu(
        &mut self,
        devices: &VfioUserDevices,
        host_page_pool: HostPagePool,
        inject_reply: Option<InjectedReply>,
        log: &Log,
    ) -> Result<PvIommu, (PathBuf, io::Error)> {
        let counters = self.count(PVIOMMU);
        let endpoints = [
            (BLK.0, devices.disk.is_some()),
            (NET.0, devices.net.is_some()),
            (RNG.0, devices.entropy),
        ];
        let endpoints = endpoints.iter().filter(|(_, there)| *there);
        let endpoints: Vec<_> = endpoints
            .map(|(slot, _)| RequesterId::new(slot.address()))
            .collect();
        let assigned = devices.disk.as_ref();
        let assigned = assigned.filter(|disk| disk.mode.is_assigned());
        let assigned = assigned.map(|_| RequesterId::new(BLK.0.address()));
        let iommu = PvIommu::with_assigned(
            &endpoints,
            assigned.as_slice(),
            host_page_pool,
            Arc::clone(&counters),
        );
        let iommu = iommu.map_err(|e| (self.machine.dir.clone(), e))?;
        if devices.memory.locked == Locked::Mapped {
            iommu.lock_mapped();
        }
        let mut device = PvIommuDevice::new(iommu.clone(), Arc::clone(&counters));
        if let Some(inject_reply) = inject_reply {
            device.inject_reply(inject_reply);
        }
        let function = VirtioPci::new(device, iommu.memory(), false, Arc::clone(&counters));
        self.machine.devices.push((IOMMU_SLOT, PVIOMMU));
        self.listen_for(PVIOMMU, function, counters, log)?;
        Ok(iommu)
    }

    /// Attaches a device behind the IOMMU. Without an IOMMU the device can access all of memory.
    fn attach<D: Device + Send + 'static>(
        &mut self,
        (slot, name): (PciSlot, &'static str),
        device: D,
        iommu: Option<&GuestIommu>,
        counters: Arc<DeviceCounters>,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        self.machine.devices.push((slot, name));
        let Some(iommu) = iommu else {
            let function = VirtioPci::new(device, Direct::default(), false, Arc::clone(&counters));
            return self.listen_for(name, function, counters, log);
        };
        let dma = iommu
            .add_endpoint(RequesterId::new(slot.address()))
            .map_err(|error| (self.machine.socket(name), io::Error::other(error)))?;
        let function = VirtioPci::new(device, dma, true, Arc::clone(&counters));
        self.listen_for(name, function, counters, log)
    }

    fn listen_for<D: Device + Send + 'static, A: Dma + 'static>(
        &mut self,
        name: &'static str,
        function: VirtioPci<D, A>,
        counters: Arc<DeviceCounters>,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        let path = self.machine.socket(name);
        let access = self.machine.access;
        let slot = ClientSlot::new(self.listen(&path, access)?, function)
            .with_memory_rules(self.rules.clone())
            .with_access(access);
        let prepared = self.prepare(name, slot, counters, log);
        prepared.map_err(|error| (path, io::Error::other(error)))
    }

    /// Prepares a thread that serves the device.
    fn prepare<D: Device + Send + 'static, A: Dma + 'static>(
        &mut self,
        name: &'static str,
        slot: ClientSlot<VirtioPci<D, A>>,
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
            thread::spawn(move || {
                confine::serving_thread(prepared, kept).and_then(|()| paused.serve())
            })
        });
        self.threads.extend(threads);
        if let Some(Ok(listener)) = self.metrics.as_ref().map(UnixListener::try_clone) {
            let (stop, counters) = (self.stop.clone(), self.counters.clone());
            self.threads.push(thread::spawn(move || {
                confine::serving_thread(prepared, CapabilitySet::empty())?;
                serve_text(&listener, SocketAccess::OwnUser, &stop, || text(&counters))
            }));
        }
    }

    fn listen_metrics(&mut self) -> Result<(), (PathBuf, io::Error)> {
        let path = self.machine.dir.join(METRICS);
        self.metrics = Some(self.listen(&path, SocketAccess::OwnUser)?);
        Ok(())
    }

    /// Lets another process of the same user take over the devices, through `control.sock` in the
    /// directory. Devices behind QEMU's IOMMU cannot be taken over.
    ///
    /// # Errors
    /// Listening failed.
    pub fn offer_hand_over(&mut self, limits: HandOverTimeouts, log: &Log) -> io::Result<()> {
        let path = self.machine.dir.join(CONTROL);
        if self.control.is_none() && self.machine.qemu_iommu.is_none() {
            let listener = self.listen(&path, SocketAccess::OwnUser);
            let listener = listener.map_err(|(_, error)| error)?;
            self.control = Some(listener);
        }
        let (Some(control), Some(metrics)) = (self.control.take(), self.metrics.take()) else {
            return Ok(());
        };
        let offered = HandOverSource {
            control,
            metrics: metrics.into(),
            devices: self.pause_handles.clone(),
            limits,
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
        Ok(())
    }

    /// Returns the arguments of the virtual machine that has the devices.
    pub fn machine(&mut self) -> &mut QemuArgs {
        &mut self.machine
    }

    /// Returns the current counters in Prometheus' text format. `metrics.sock` serves the same
    /// text.
    pub fn metrics(&self) -> String {
        text(&self.counters)
    }

    /// Waits until every thread has ended. The threads end only after [`StopSignal::stop`] or an
    /// error.
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
        self.remove_sockets();
        result.map(|()| EndReason::Stopped)
    }

    fn remove_sockets(&self) {
        for socket in &self.sockets {
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

/// Returns the disk's injector; the entropy device performs the foreign accesses.
fn text(counters: &[NamedCounters]) -> String {
    let counters: Vec<_> = counters.iter().map(|(name, c)| (*name, &**c)).collect();
    prometheus(&counters)
}
