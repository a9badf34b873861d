//! A disk with an NVMe interface.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ringfence_types::RequesterId;

use super::disk::dma_injector;
use super::options::{Disk, DiskMode};
use super::{BLK, Daemon, Log};
use crate::assigned::AssignedDma;
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma};
use crate::iommu::{EndpointDma, GuestIommu};
use crate::limits::GuestLimits;
use crate::nvme::{self, FileMedium, NvmeFunction};
use crate::virtio::DmaInjector;
use crate::virtio::blk::Blk;

/// Parts of the function besides its access to memory.
struct Parts {
    config: ringfence_nvme_device::Config,
    medium: FileMedium,
    injector: Option<DmaInjector>,
    delay: Option<Duration>,
    counters: Arc<DeviceCounters>,
}

impl Daemon {
    /// Attaches an NVMe controller for the disk, whose image is open.
    pub(super) fn attach_nvme(
        &mut self,
        disk: &Blk,
        options: &Disk,
        limits: &GuestLimits,
        (iommu, counters): (Option<&GuestIommu>, Arc<DeviceCounters>),
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        let (slot, name) = BLK;
        let id = RequesterId::new(slot.address());
        let medium = FileMedium::new(disk, Arc::clone(&counters));
        let (is_assigned, delay) = match &options.mode {
            DiskMode::Emulated { delay } => (false, *delay),
            DiskMode::Assigned { delay } => (true, *delay),
            DiskMode::Sandbox(_) => (false, None),
        };
        let parts = Parts {
            config: nvme::config(disk, limits),
            medium: medium.map_err(|error| (options.path.clone(), error))?,
            injector: dma_injector(&options.inject_dma, iommu, &counters, log),
            delay,
            counters: Arc::clone(&counters),
        };
        let socket = self.machine.socket(name);
        let at = |error| (socket.clone(), error);
        match (iommu, is_assigned) {
            (None, false) => self.listen_nvme(Direct::default(), parts, log),
            (None, true) => {
                let dma = AssignedDma::identity_mapped(id, counters).map_err(at)?;
                self.listen_nvme(dma, parts, log)
            }
            (Some(iommu), true) => {
                let dma = iommu.assign(id, counters).map_err(at)?;
                self.listen_nvme(dma, parts, log)
            }
            (Some(iommu), false) => {
                let added = iommu.add_endpoint(id, &counters).map_err(io::Error::other);
                match added.map_err(at)? {
                    EndpointDma::Software(dma) => self.listen_nvme(*dma, parts, log),
                    EndpointDma::Ring(dma) => self.listen_nvme(dma, parts, log),
                }
            }
        }
    }

    fn listen_nvme<A: Dma + 'static>(
        &mut self,
        dma: A,
        parts: Parts,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        let (_, name) = BLK;
        let counters = Arc::clone(&parts.counters);
        let mut function = NvmeFunction::new(&parts.config, parts.medium, dma, parts.counters);
        if let Some(injector) = parts.injector {
            function.inject_dma(injector);
        }
        if let Some(delay) = parts.delay {
            let delayed = function.delay(delay);
            delayed.map_err(|error| (self.machine.socket(name), error))?;
        }
        self.attach_at(BLK, function, counters, log)
    }
}
