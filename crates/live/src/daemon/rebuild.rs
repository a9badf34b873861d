//! Rebuilds devices from the state that another process has handed over.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use ringfence_types::RequesterId;
use ringfence_vfio_user::Inbox;
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::dma_path::{DmaPath, device_id, disk, is_assigned, slot_and_name, start_sandbox};
use super::paused::PausedDevice;
use super::{BLK, Daemon, IOMMU_SLOT, LocalConfig, METRICS, rate_limited_log};
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma};
use crate::handover::{
    CONTROL, DeviceState, FunctionState, HandOverBlocker, SavedDevice, SavedDevices, SessionState,
    StateError,
};
use crate::iommu::{GuestIommu, Recorder, VirtioIommu};
use crate::memory::{GuestRam, Locked};
use crate::pviommu::PvIommu;
use crate::qemu::{IOMMU, PVIOMMU};
use crate::record::DmaRecord;
use crate::sandbox::{DiskProxy, Grants};
use crate::server::{ClientConnection, ClientSlot, LogBudget};
use crate::session::Session;
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
        let mut daemon = Self::without_devices(config.dir)?;
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
        let is_iommu = |device: &SavedDevice| {
            matches!(
                device.state,
                DeviceState::Iommu { .. } | DeviceState::PvIommu(_)
            )
        };
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
            let unit = match &device.state {
                DeviceState::PvIommu(_) => {
                    let known = Arc::clone(&counters);
                    let unit = PvIommu::with_assigned(
                        &endpoints,
                        &assigned,
                        config.host_page_pool,
                        known,
                    )?;
                    if config.memory.locked == Locked::Mapped {
                        unit.lock_mapped();
                    }
                    GuestIommu::Para(unit)
                }
                _ => GuestIommu::Virtio(VirtioIommu::with_limits(
                    config.limits,
                    Arc::clone(&counters),
                )?),
            };
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
                DmaPath::Translated(dma) => {
                    daemon.rebuild_device(state, process, *dma, DmaAddresses::Translated, left)
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
        daemon.metrics = Some(Arc::new(listener(saved.metrics)?));
        daemon.control = Some(listener(saved.control)?);
        Ok(daemon)
    }

    fn rebuild_iommu(
        &mut self,
        iommu: &GuestIommu,
        state: DeviceState,
        rest: SavedTransport<'_>,
    ) -> Result<(), StateError> {
        let begun = rest.function.common.begun();
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
                device.set_log(rate_limited_log(IOMMU, rest.config.log));
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
                let begun = rest.function.common.begun();
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
        let function = VirtioPci::new(device, dma, addresses, Arc::clone(&rest.counters));
        let (name, counters, log) = (rest.name, Arc::clone(&rest.counters), rest.config.log);
        self.prepare(name, rebuild_slot(function, rest)?, counters, log)
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
        Ok(SavedDevices {
            metrics: clone(daemon.metrics.as_deref())?,
            control: clone(daemon.control.as_ref())?,
            devices: daemon
                .paused
                .iter()
                .map(PausedDevice::save)
                .collect::<Result<_, _>>()?,
        })
    }
}

/// A handed-over device without its own state: registers, sockets and session.
struct SavedTransport<'h> {
    name: &'static str,
    listener: OwnedFd,
    function: FunctionState,
    session: Option<SessionState>,
    counters: Arc<DeviceCounters>,
    config: LocalConfig<'h>,
}

impl<'h> SavedTransport<'h> {
    fn of(
        device: SavedDevice,
        counters: Arc<DeviceCounters>,
        config: LocalConfig<'h>,
    ) -> (DeviceState, Self) {
        let SavedDevice {
            state,
            listener,
            function,
            session,
            requests: _,
        } = device;
        let name = slot_and_name(&state).1;
        (
            state,
            Self {
                name,
                listener,
                function,
                session,
                counters,
                config,
            },
        )
    }
}

fn rebuild_slot<D: Device, A: Dma>(
    mut function: VirtioPci<D, A>,
    rest: SavedTransport<'_>,
) -> Result<ClientSlot<VirtioPci<D, A>>, StateError> {
    function.restore(rest.function)?;
    let rules = rest.config.memory.clone();
    let socket = listener(rest.listener)?;
    let Some(session) = rest.session else {
        let slot = ClientSlot::new(socket, function);
        return Ok(slot
            .with_memory_rules(rules)
            .with_access(rest.config.access));
    };
    let stream = socket_of(session.stream, false)?;
    let inbox = Inbox::with_part(&session.bytes, session.fds, session.too_many_fds);
    let inbox = inbox.ok_or(StateError::Register {
        what: "partial message",
    })?;
    let ram = GuestRam::restore(rules.clone(), session.ranges).map_err(StateError::Memory)?;
    let conversation = ClientConnection {
        stream: UnixStream::from(stream),
        session: Session::resume(function, ram, session.agreed),
        inbox,
        words: LogBudget::default(),
    };
    let slot = ClientSlot::with(socket, conversation);
    Ok(slot
        .with_memory_rules(rules)
        .with_access(rest.config.access))
}

fn listener(fd: OwnedFd) -> Result<UnixListener, StateError> {
    socket_of(fd, true).map(UnixListener::from)
}

/// Checks that `fd` is a local stream socket that listens, or is connected.
fn socket_of(fd: OwnedFd, listens: bool) -> Result<OwnedFd, StateError> {
    let socket = fd.as_fd();
    let fits = sockopt::socket_domain(socket).is_ok_and(|family| family == AddressFamily::UNIX)
        && sockopt::socket_type(socket).is_ok_and(|kind| kind == SocketType::STREAM)
        && sockopt::socket_acceptconn(socket).is_ok_and(|one| one == listens);
    if fits {
        Ok(fd)
    } else {
        Err(StateError::NotA { what: "socket" })
    }
}
