//! The disk of a guest, in each of its modes.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringfence_types::RequesterId;
use rustix::thread::CapabilitySet;

use super::options::{Disk, DiskBus, DiskMode, SANDBOX_NEEDS_IOMMU, VhostUserDisk};
use super::sandboxed_disk::{SandboxArgs, start_sandboxed_disk};
use super::{BLK, Daemon, Log, RNG, at, bounded_log};
use crate::assigned::AssignedDma;
use crate::confine;
use crate::counters::DeviceCounters;
use crate::dma_fault_injection::{InjectedDma, InjectionResult};
use crate::iommu::GuestIommu;
use crate::limits::GuestLimits;
use crate::qemu::PciSlot;
use crate::server::{EventHandler, ServeEvent};
use crate::vhost_user::{self, Clients, Settings};
use crate::virtio::blk::Blk;
use crate::virtio::delayed::Delayed;
use crate::virtio::{Device, DmaAddresses, DmaInjector, VirtioPci};

impl Daemon {
    /// Attaches the disk in its mode.
    pub(super) fn attach_disk(
        &mut self,
        options: &Disk,
        limits: &GuestLimits,
        iommu: Option<&GuestIommu>,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        let at = at(&options.path);
        let (mut disk, counters) = self.open_disk(&options.path, options.read_only, limits, log)?;
        if options.bus == DiskBus::Nvme {
            return self.attach_nvme(&disk, options, limits, (iommu, counters), log);
        }
        if !matches!(options.mode, DiskMode::Sandbox(_)) {
            inject_dma(&mut disk, &options.inject_dma, iommu, &counters, log);
        }
        match &options.mode {
            DiskMode::Emulated { delay: None } => self.attach(BLK, disk, iommu, counters, log),
            DiskMode::Emulated { delay: Some(delay) } => {
                let disk = Delayed::new(disk, *delay).map_err(at)?;
                self.attach(BLK, disk, iommu, counters, log)
            }
            DiskMode::Assigned { delay: None } => self.assign(BLK, disk, iommu, counters, log),
            DiskMode::Assigned { delay: Some(delay) } => {
                let disk = Delayed::new(disk, *delay).map_err(at)?;
                self.assign(BLK, disk, iommu, counters, log)
            }
            DiskMode::Sandbox(program) => {
                let missing = || io::Error::new(io::ErrorKind::InvalidInput, SANDBOX_NEEDS_IOMMU);
                let iommu = iommu.ok_or_else(missing).map_err(&at)?;
                let args = SandboxArgs {
                    read_only: options.read_only,
                    limits,
                    injected: &options.inject_dma,
                };
                let proxy = start_sandboxed_disk(program, disk, &args, iommu, &counters, log);
                self.attach(BLK, proxy.map_err(at)?, Some(iommu), counters, log)
            }
        }
    }

    /// Attaches an assigned device.
    fn assign<D: Device + Send + 'static>(
        &mut self,
        (slot, name): (PciSlot, &'static str),
        device: D,
        iommu: Option<&GuestIommu>,
        counters: Arc<DeviceCounters>,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        let id = RequesterId::new(slot.address());
        let dma = match iommu {
            Some(iommu) => iommu.assign(id, Arc::clone(&counters)),
            None => AssignedDma::identity_mapped(id, Arc::clone(&counters)),
        };
        let dma = dma.map_err(|error| (self.machine.socket(name), error))?;
        let addresses = match iommu {
            Some(_) => DmaAddresses::Translated,
            None => DmaAddresses::GuestPhysical,
        };
        let function = VirtioPci::new(device, dma, addresses, Arc::clone(&counters));
        self.attach_at((slot, name), function, counters, log)
    }

    /// Serves a disk behind the IOMMU of a vhost-user front-end.
    pub(super) fn back_end(
        &mut self,
        (slot, name): (PciSlot, &'static str),
        options: &VhostUserDisk,
        limits: &GuestLimits,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        let (mut disk, counters) = self.open_disk(&options.path, options.read_only, limits, log)?;
        inject_dma(&mut disk, &options.inject_dma, None, &counters, log);
        let access = self.machine.access;
        let listener = self.listen(&self.machine.socket(name), access)?;
        self.machine.qemu_iommu = Some(options.iommu);
        self.machine.devices.push((slot, name));
        let (stop, log) = (self.stop.clone(), Arc::clone(log));
        let settings = Settings {
            device: RequesterId::new(slot.address()),
            iotlb: limits.iotlb(),
        };
        let report: EventHandler = Arc::new(move |event| log(name, event));
        let prepared = confine::prepare();
        let started = self.threads.spawn(name, move || {
            confine::serving_thread(prepared, CapabilitySet::empty())?;
            let clients = Clients {
                listener: &listener,
                access,
            };
            vhost_user::serve(&clients, disk, &settings, &counters, &stop, &report)
        });
        started.map_err(at(&self.machine.dir))
    }

    /// Opens the image of a disk.
    fn open_disk(
        &mut self,
        path: &Path,
        read_only: bool,
        limits: &GuestLimits,
        log: &Log,
    ) -> Result<(Blk, Arc<DeviceCounters>), (PathBuf, io::Error)> {
        let mut options = File::options();
        let file = options.read(true).write(!read_only).open(path);
        let file = file.map_err(at(path))?;
        let counters = self.add_counters(BLK.1);
        let mut disk = Blk::new(file, read_only, Arc::clone(&counters)).map_err(at(path))?;
        disk.set_limits(limits, bounded_log(BLK.1, log));
        self.file_bytes = self.file_bytes.max(disk.bytes());
        Ok((disk, counters))
    }
}

/// Attaches an injector of the selected classes to the disk.
fn inject_dma(
    disk: &mut Blk,
    classes: &[InjectedDma],
    iommu: Option<&GuestIommu>,
    counters: &Arc<DeviceCounters>,
    log: &Log,
) {
    if let Some(injector) = dma_injector(classes, iommu, counters, log) {
        disk.inject_dma(injector);
    }
}

/// Returns an injector of the selected classes; `None` if there is none. The entropy device
/// performs the accesses of another device.
pub(super) fn dma_injector(
    classes: &[InjectedDma],
    iommu: Option<&GuestIommu>,
    counters: &Arc<DeviceCounters>,
    log: &Log,
) -> Option<DmaInjector> {
    if classes.is_empty() {
        return None;
    }
    let other = RequesterId::new(RNG.0.address());
    let other = iommu.and_then(|iommu| iommu.add_reader(other).ok());
    let log = Arc::clone(log);
    let tell = move |tried: &InjectionResult| log(BLK.1, &ServeEvent::InjectedDma(tried));
    Some(DmaInjector::new(classes, other, tell, Arc::clone(counters)))
}
