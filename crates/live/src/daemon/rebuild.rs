//! Rebuilds devices from the state that another process has handed over.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use ringfence_types::RequesterId;

use super::dma_path::{DmaPath, device_id, disk, is_assigned, slot_and_name, start_sandbox};
use super::offer::{OfferSockets, OfferState};
use super::paused::PausedDevice;
use super::saved_transport::{SavedConnection, SavedTransport, listener, rebuild_slot};
use super::{BLK, Daemon, IOMMU_SLOT, LocalConfig, METRICS, bounded_log};
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma};
use crate::handover::{
    CONTROL, DeviceState, FunctionState, HandOverBlocker, HandOverFunction, SavedDevice,
    SavedDevices, StateError,
};
use crate::iommu::{EndpointDma, GuestIommu, Recorder, VirtioIommu};
use crate::memory::Locked;
use crate::pviommu::PvIommu;
use crate::qemu::{IOMMU, PVIOMMU, RIOMMU};
use crate::record::DmaRecord;
use crate::riommu::{RingIommu, RiommuFunction, RiommuState};
use crate::sandbox::{DiskProxy, Grants};
use crate::virtio::blk::SECTOR_BYTES;
use crate::virtio::iommu::IommuDevice;
use crate::virtio::net::Net;
use crate::virtio::pviommu::PvIommuDevice;
use crate::virtio::rng::Rng;
use crate::virtio::{Device, DmaAddresses, VirtioPci};

impl Daemon {
    /// Checks that this process could serve the state that another process sent. Serves nothing.
    ///
    /// # Errors
    /// [`StateError`] if the state is invalid or does not fit this process.
    pub fn rehearse(
        config: LocalConfig<'_>,
        saved: SavedDevices,
    ) -> Result<RestoredDevices, StateError> {
        Self::rebuild(config, saved).map(RestoredDevices)
    }

    /// Rebuilds the devices of `handed`. They are paused until [`launch`](Self::launch).
    pub(super) fn rebuild(
        config: LocalConfig<'_>,
        saved: SavedDevices,
    ) -> Result<Self, StateError> {
        config.check(&saved.devices)?;
        let mut daemon = Self::without_devices(config.dir, config.log)?;
        daemon.rules = config.memory.clone();
        daemon.machine.access = config.access;
        let disks = saved
            .devices
            .iter()
            .filter_map(|device| match device.state {
                DeviceState::Blk { sectors, .. } => Some(sectors.saturating_mul(SECTOR_BYTES)),
                _ => None,
            });
        daemon.file_bytes = disks.max().unwrap_or(0).max(config.limits.record_bytes);
        let is_iommu = |device: &SavedDevice| device.state.is_iommu();
        let (mut iommus, others): (Vec<_>, Vec<_>) = saved.devices.into_iter().partition(is_iommu);
        let iommu_device = iommus.pop();
        if !iommus.is_empty() {
            return Err(StateError::Register { what: "IOMMU" });
        }
        let endpoints: Vec<RequesterId> = others.iter().map(|one| device_id(&one.state)).collect();
        let assigned = others.iter().filter(|one| is_assigned(&one.state));
        let assigned: Vec<RequesterId> = assigned.map(|one| device_id(&one.state)).collect();
        let iommu_device = iommu_device.map(|device| {
            let counters = daemon.add_counters(slot_and_name(&device.state).1);
            let unit = guest_iommu(&device.state, &endpoints, &assigned, &counters, config)?;
            Ok::<_, StateError>((unit, device, counters))
        });
        let iommu_device = iommu_device.transpose()?;
        // Add the endpoints first, because an IOMMU's state refers to them.
        let mut rest = Vec::new();
        for device in others {
            let name = slot_and_name(&device.state).1;
            let counters = daemon.add_counters(name);
            let iommu = iommu_device.as_ref().map(|(iommu, ..)| iommu);
            let process = start_sandbox(&device.state, iommu, &counters, config)?;
            let dma_path = DmaPath::new(&device.state, iommu, &counters)?;
            let (state, left) = SavedTransport::of(device, counters, config);
            rest.push((state, process, dma_path, left));
        }
        let iommu = iommu_device.as_ref().map(|(iommu, ..)| iommu.clone());
        if let Some((iommu, device, counters)) = iommu_device {
            let (state, left) = SavedTransport::of(device, counters, config);
            daemon.rebuild_iommu(&iommu, state, left)?;
        }
        for (state, process, dma_path, left) in rest {
            match dma_path {
                DmaPath::Direct => daemon.rebuild_device(
                    state,
                    process,
                    Direct::default(),
                    DmaAddresses::GuestPhysical,
                    left,
                ),
                DmaPath::Translated(EndpointDma::Software(dma)) => {
                    daemon.rebuild_device(state, process, *dma, DmaAddresses::Translated, left)
                }
                DmaPath::Translated(EndpointDma::Ring(dma)) => {
                    daemon.rebuild_device(state, process, dma, DmaAddresses::Translated, left)
                }
                DmaPath::Assigned(dma) => {
                    daemon.rebuild_device(state, process, dma, DmaAddresses::Translated, left)
                }
                DmaPath::AssignedIdentity(dma) => {
                    daemon.rebuild_device(state, process, dma, DmaAddresses::GuestPhysical, left)
                }
            }?;
        }
        // A sandboxed process has acknowledged its grants by now, or has ended.
        let disk = RequesterId::new(BLK.0.address());
        let violation = iommu.and_then(|iommu| iommu.with_grants(disk, Grants::take_violation));
        if let Some(Some(violation)) = violation {
            return Err(io::Error::other(violation).into());
        }
        if let Some(path) = &config.memory.file {
            daemon.paths_to_remove.push(path.clone());
            daemon.machine.memory_file = Some(path.clone());
        }
        let names = [METRICS, CONTROL].map(|name| config.dir.join(name));
        let devices = daemon.pause_handles.iter();
        let devices = devices.map(|(name, _)| daemon.machine.socket(name));
        let sockets: Vec<PathBuf> = devices.chain(names).collect();
        daemon.paths_to_remove.extend(sockets);
        daemon.offer = OfferState::Possible(OfferSockets {
            metrics: Arc::new(listener(saved.metrics)?),
            control: Some(listener(saved.control)?),
        });
        Ok(daemon)
    }

    fn rebuild_iommu(
        &mut self,
        iommu: &GuestIommu,
        state: DeviceState,
        rest: SavedTransport<'_>,
    ) -> Result<(), StateError> {
        let begun = rest.begun();
        let counters = Arc::clone(&rest.counters);
        // Restore the memory first, because the mappings refer to it.
        match (iommu, state) {
            (
                GuestIommu::Virtio(unit),
                DeviceState::Iommu {
                    snapshot,
                    record,
                    dmas,
                },
            ) => {
                let most = rest.config.limits.record_bytes;
                let dmas = dmas
                    .map(|dmas| DmaRecord::restore(dmas, most))
                    .transpose()?;
                let mut device = IommuDevice::new(unit.clone(), counters);
                if let Some(record) = record {
                    device.record(Recorder::restore(record, most)?);
                }
                device.set_log(bounded_log(IOMMU, rest.config.log));
                self.machine.iommu = Some(IOMMU_SLOT);
                self.restore_device(device, unit.memory(), DmaAddresses::GuestPhysical, rest)?;
                if dmas.is_some() {
                    unit.follow_mappings();
                }
                unit.restore(&snapshot).map_err(StateError::Iommu)?;
                // The other process has recorded the maps of the snapshot.
                if let Some(dmas) = dmas {
                    unit.record_dmas(dmas);
                }
                // Under other features the driver's requests would have another meaning.
                if !unit.has_accepted(begun.unwrap_or(0)) {
                    return Err(StateError::Register {
                        what: "accepted features of the virtio-iommu",
                    });
                }
            }
            (GuestIommu::Para(unit), DeviceState::PvIommu(state)) => {
                let device = PvIommuDevice::new(unit.clone(), counters);
                self.machine.devices.push((IOMMU_SLOT, PVIOMMU));
                self.restore_device(device, unit.memory(), DmaAddresses::GuestPhysical, rest)?;
                if state.running != begun.is_some() {
                    return Err(StateError::Register {
                        what: "driver state of the para-virtual IOMMU",
                    });
                }
                unit.unit().restore(&state)?;
            }
            // The devices behind it are still paused: their first access finds the registers, and
            // the memory of its client.
            (GuestIommu::Ring(iommu), DeviceState::Ring(state)) => {
                self.machine.devices.push((IOMMU_SLOT, RIOMMU));
                self.restore_ring(RiommuFunction::new(iommu.clone()), &state, rest)?;
            }
            _ => return Err(StateError::Register { what: "IOMMU" }),
        }
        Ok(())
    }

    fn rebuild_device<A: Dma + 'static>(
        &mut self,
        state: DeviceState,
        process: Option<DiskProxy>,
        dma: A,
        addresses: DmaAddresses,
        rest: SavedTransport<'_>,
    ) -> Result<(), StateError> {
        self.machine.devices.push(slot_and_name(&state));
        let counters = Arc::clone(&rest.counters);
        match (state, process) {
            (DeviceState::Blk { .. }, Some(proxy)) => {
                self.restore_device(proxy, dma, addresses, rest)
            }
            (
                DeviceState::Blk {
                    file,
                    read_only,
                    sectors,
                    kind: _,
                },
                None,
            ) => {
                let disk = disk(file, read_only, sectors, counters, rest.config)?;
                self.restore_device(disk, dma, addresses, rest)
            }
            (DeviceState::Net(state), _) => {
                let begun = rest.begun();
                let mut net = Net::restore(*state, begun, counters)?;
                // The socket belongs to the old process until this daemon serves and ends.
                self.paths_to_remove.extend(net.link().name());
                self.restore_device(net, dma, addresses, rest)
            }
            _ => self.restore_device(Rng::new(counters), dma, addresses, rest),
        }
    }

    /// Restores a device's registers, and prepares a thread that serves it.
    fn restore_device<D: Device + Send + 'static, A: Dma + 'static>(
        &mut self,
        device: D,
        dma: A,
        addresses: DmaAddresses,
        rest: SavedTransport<'_>,
    ) -> Result<(), StateError> {
        let mut function = VirtioPci::new(device, dma, addresses, Arc::clone(&rest.counters));
        let FunctionState::Virtio(registers) = rest.function else {
            return Err(StateError::Register { what: "registers" });
        };
        function.restore(registers)?;
        self.resume(
            function,
            rest.name,
            rest.connection,
            rest.counters,
            rest.config,
        )
    }

    fn restore_ring(
        &mut self,
        mut function: RiommuFunction,
        state: &RiommuState,
        rest: SavedTransport<'_>,
    ) -> Result<(), StateError> {
        let FunctionState::Plain(registers) = rest.function else {
            return Err(StateError::Register { what: "registers" });
        };
        function.restore(registers, state)?;
        self.resume(
            function,
            rest.name,
            rest.connection,
            rest.counters,
            rest.config,
        )
    }

    /// Prepares a thread that serves a restored function to its client.
    fn resume<F: HandOverFunction + Send + 'static>(
        &mut self,
        function: F,
        name: &'static str,
        connection: SavedConnection,
        counters: Arc<DeviceCounters>,
        config: LocalConfig<'_>,
    ) -> Result<(), StateError> {
        let slot = rebuild_slot(function, connection, config)?;
        self.prepare(name, slot, counters, config.log)
    }
}

/// Devices that were rebuilt but are not served.
#[derive(Debug)]
pub struct RestoredDevices(pub(super) Daemon);

impl RestoredDevices {
    /// Returns the state that a third process would receive.
    ///
    /// # Errors
    /// [`HandOverBlocker`] if a device cannot be handed over.
    pub fn save(&self) -> Result<SavedDevices, HandOverBlocker> {
        let Self(daemon) = self;
        let clone = |socket: Option<&UnixListener>| match socket {
            Some(socket) => socket.as_fd().try_clone_to_owned(),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        let sockets = daemon.offer.sockets();
        Ok(SavedDevices {
            metrics: clone(sockets.map(|sockets| &*sockets.metrics))?,
            control: clone(sockets.and_then(|sockets| sockets.control.as_ref()))?,
            devices: daemon
                .paused
                .iter()
                .map(PausedDevice::save)
                .collect::<Result<_, _>>()?,
        })
    }
}

/// Creates the unit of the guest's IOMMU, before its state is restored.
fn guest_iommu(
    state: &DeviceState,
    endpoints: &[RequesterId],
    assigned: &[RequesterId],
    counters: &Arc<DeviceCounters>,
    config: LocalConfig<'_>,
) -> Result<GuestIommu, StateError> {
    let known = Arc::clone(counters);
    Ok(match state {
        DeviceState::PvIommu(_) => {
            let unit = PvIommu::with_assigned(endpoints, assigned, config.host_page_pool, known)?;
            if config.memory.locked == Locked::Mapped {
                unit.lock_mapped();
            }
            GuestIommu::Para(unit)
        }
        DeviceState::Ring(_) => GuestIommu::Ring(RingIommu::new(endpoints, known)?),
        _ => GuestIommu::Virtio(VirtioIommu::with_limits(config.limits, known)?),
    })
}
