//! The IOMMUs of a guest, and the devices behind them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringfence_types::RequesterId;

use super::{BLK, Daemon, IOMMU_SLOT, Log, NET, RNG, VfioUserDevices, at, bounded_log};
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma};
use crate::handover::HandOverFunction;
use crate::host::HostPagePool;
use crate::iommu::{EndpointDma, GuestIommu, Recorder, VirtioIommu};
use crate::limits::GuestLimits;
use crate::memory::Locked;
use crate::pviommu::PvIommu;
use crate::qemu::{IOMMU, PVIOMMU, PciSlot, RIOMMU};
use crate::riommu::{RingIommu, RiommuFunction};
use crate::server::ClientSlot;
use crate::virtio::iommu::IommuDevice;
use crate::virtio::pviommu::{InjectedReply, PvIommuDevice};
use crate::virtio::{Device, DmaAddresses, VirtioPci};

/// Paths of the files that record what happens behind a virtio-iommu.
pub(super) struct RecordPaths<'a> {
    /// Requests of the driver.
    pub(super) requests: Option<&'a Path>,
    /// DMAs of the devices, between maps and unmaps.
    pub(super) dmas: Option<&'a Path>,
}

impl Daemon {
    /// Attaches the virtio-iommu.
    ///
    /// # Errors
    /// The unit, a record or the socket could not be created. The error names the path.
    pub(super) fn attach_iommu(
        &mut self,
        records: RecordPaths<'_>,
        limits: &GuestLimits,
        log: &Log,
    ) -> Result<VirtioIommu, (PathBuf, io::Error)> {
        let counters = self.add_counters(IOMMU);
        let iommu = VirtioIommu::with_limits(limits, Arc::clone(&counters))
            .map_err(|e| (self.machine.dir.clone(), e))?;
        let mut device = IommuDevice::new(iommu.clone(), Arc::clone(&counters));
        device.set_log(bounded_log(IOMMU, log));
        if let Some(path) = records.requests {
            let record = Recorder::create(path, limits.record_bytes);
            device.record(record.map_err(at(path))?);
        }
        if let Some(path) = records.dmas {
            let created = iommu.create_dma_record(path, limits.record_bytes);
            created.map_err(at(path))?;
        }
        let dma = iommu.memory();
        let function = VirtioPci::new(
            device,
            dma,
            DmaAddresses::GuestPhysical,
            Arc::clone(&counters),
        );
        self.listen_for(IOMMU, function, counters, log)?;
        self.machine.iommu = Some(IOMMU_SLOT);
        Ok(iommu)
    }

    /// Attaches the para-virtual IOMMU. No firmware table describes it; its driver recognises its
    /// PCI ID.
    ///
    /// # Errors
    /// The unit or the socket could not be created. The error names the path.
    pub(super) fn attach_pviommu(
        &mut self,
        devices: &VfioUserDevices,
        host_page_pool: HostPagePool,
        inject_reply: Option<InjectedReply>,
        log: &Log,
    ) -> Result<PvIommu, (PathBuf, io::Error)> {
        let counters = self.add_counters(PVIOMMU);
        let endpoints = endpoints(devices);
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
        let function = VirtioPci::new(
            device,
            iommu.memory(),
            DmaAddresses::GuestPhysical,
            Arc::clone(&counters),
        );
        self.attach_at((IOMMU_SLOT, PVIOMMU), function, counters, log)?;
        Ok(iommu)
    }

    /// Attaches the ring IOMMU. No firmware table describes it; its driver recognises its PCI ID.
    ///
    /// # Errors
    /// The IOMMU or its socket could not be created. The error names the path.
    pub(super) fn attach_ring(
        &mut self,
        devices: &VfioUserDevices,
        log: &Log,
    ) -> Result<RingIommu, (PathBuf, io::Error)> {
        let counters = self.add_counters(RIOMMU);
        let iommu = RingIommu::new(&endpoints(devices), Arc::clone(&counters));
        let iommu = iommu.map_err(|e| (self.machine.dir.clone(), e))?;
        let function = RiommuFunction::new(iommu.clone());
        self.attach_at((IOMMU_SLOT, RIOMMU), function, counters, log)?;
        Ok(iommu)
    }

    /// Attaches a device behind the IOMMU. Without an IOMMU the device can access all of memory.
    ///
    /// # Errors
    /// The IOMMU does not know the device or takes no further endpoint, or the socket could not be
    /// created. The error names the path.
    pub(super) fn attach<D: Device + Send + 'static>(
        &mut self,
        (slot, name): (PciSlot, &'static str),
        device: D,
        iommu: Option<&GuestIommu>,
        counters: Arc<DeviceCounters>,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        let slot_and_name = (slot, name);
        let Some(iommu) = iommu else {
            let function = VirtioPci::new(
                device,
                Direct::default(),
                DmaAddresses::GuestPhysical,
                Arc::clone(&counters),
            );
            return self.attach_at(slot_and_name, function, counters, log);
        };
        let added = iommu.add_endpoint(RequesterId::new(slot.address()), &counters);
        let dma = added.map_err(|error| (self.machine.socket(name), io::Error::other(error)))?;
        match dma {
            EndpointDma::Software(dma) => {
                let function = translated(device, *dma, &counters);
                self.attach_at(slot_and_name, function, counters, log)
            }
            EndpointDma::Ring(dma) => {
                let function = translated(device, dma, &counters);
                self.attach_at(slot_and_name, function, counters, log)
            }
        }
    }

    /// Listens on the socket of the device in a PCI slot, prepares the thread that serves it, and
    /// adds it to the machine.
    pub(super) fn attach_at<F: HandOverFunction + Send + 'static>(
        &mut self,
        (slot, name): (PciSlot, &'static str),
        function: F,
        counters: Arc<DeviceCounters>,
        log: &Log,
    ) -> Result<(), (PathBuf, io::Error)> {
        self.listen_for(name, function, counters, log)?;
        self.machine.devices.push((slot, name));
        Ok(())
    }

    /// Listens on the device's socket and prepares the thread that serves it.
    fn listen_for<F: HandOverFunction + Send + 'static>(
        &mut self,
        name: &'static str,
        function: F,
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
}

/// Returns the function of a device whose addresses an IOMMU translates.
fn translated<D: Device, A: Dma>(
    device: D,
    dma: A,
    counters: &Arc<DeviceCounters>,
) -> VirtioPci<D, A> {
    VirtioPci::new(device, dma, DmaAddresses::Translated, Arc::clone(counters))
}

/// Returns the requester IDs of the selected devices.
fn endpoints(devices: &VfioUserDevices) -> Vec<RequesterId> {
    let all = [
        (BLK.0, devices.disk.is_some()),
        (NET.0, devices.net.is_some()),
        (RNG.0, devices.entropy),
    ];
    let selected = all.iter().filter(|(_, selected)| *selected);
    let ids = selected.map(|(slot, _)| RequesterId::new(slot.address()));
    ids.collect()
}
