//! Devices out of what another process has handed over.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use ringfence_types::DeviceId;
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::ready::Ready;
use super::way::{Way, device_id, disk, is_assigned, place, process};
use super::{BLK, Daemon, Here, IOMMU_SLOT, METRICS, complaints};
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma};
use crate::guest::{IOMMU, PVIOMMU};
use crate::handover::{
    CONTROL, FunctionState, Handed, HandedDevice, Own, SessionState, StateError, Unmovable,
};
use crate::iommu::{Behind, Iommu, Recorder};
use crate::isolate::{Front, Grants};
use crate::memory::{GuestRam, Locked};
use crate::pviommu::PvIommu;
use crate::server::{Conversation, Post, Words};
use crate::session::Session;
use crate::virtio::blk::SECTOR_BYTES;
use crate::virtio::iommu::IommuDevice;
use crate::virtio::net::Net;
use crate::virtio::pviommu::PvIommuDevice;
use crate::virtio::rng::Rng;
use crate::virtio::{Device, VirtioPci};
use crate::wire::Inbox;

impl Daemon {
    /// Whether what another process says it has could be served here. Nothing of it is.
    ///
    /// # Errors
    /// [`StateError`]: what is wrong with it.
    pub fn rehearse(here: Here<'_>, handed: Handed) -> Result<Rebuilt, StateError> {
        Self::rebuild(here, handed).map(Rebuilt)
    }

    /// The devices of `handed`, which stand still until they are [`launch`](Self::launch)ed.
    pub(super) fn rebuild(here: Here<'_>, handed: Handed) -> Result<Self, StateError> {
        here.check(&handed.devices)?;
        let mut daemon = Self::empty(here.dir, None)?;
        daemon.rules = here.memory.clone();
        daemon.machine.access = here.access;
        let disks = handed.devices.iter().filter_map(|device| match device.own {
            Own::Blk { sectors, .. } => Some(sectors.saturating_mul(SECTOR_BYTES)),
            _ => None,
        });
        daemon.file_bytes = disks.max().unwrap_or(0).max(here.caps.record_bytes);
        let is_iommu =
            |device: &HandedDevice| matches!(device.own, Own::Iommu { .. } | Own::PvIommu(_));
        let (mut fronts, fronted): (Vec<_>, Vec<_>) =
            handed.devices.into_iter().partition(is_iommu);
        let front = fronts.pop();
        if !fronts.is_empty() {
            return Err(StateError::Register { what: "IOMMU" });
        }
        let behind: Vec<DeviceId> = fronted.iter().map(|one| device_id(&one.own)).collect();
        let assigned = fronted.iter().filter(|one| is_assigned(&one.own));
        let assigned: Vec<DeviceId> = assigned.map(|one| device_id(&one.own)).collect();
        let front = front.map(|device| {
            let counters = daemon.count(place(&device.own).1);
            let unit = match &device.own {
                Own::PvIommu(_) => {
                    let known = Arc::clone(&counters);
                    let unit =
                        PvIommu::with_assigned(&behind, &assigned, here.optimisations, known)?;
                    if here.memory.locked == Locked::Mapped {
                        unit.lock_mapped();
                    }
                    Behind::Para(unit)
                }
                _ => Behind::Virtio(Iommu::within(here.caps, Arc::clone(&counters))?),
            };
            Ok::<_, StateError>((unit, device, counters))
        });
        let front = front.transpose()?;
        // Endpoints first: an IOMMU's state names them.
        let mut rest = Vec::new();
        for device in fronted {
            let name = place(&device.own).1;
            let counters = daemon.count(name);
            let iommu = front.as_ref().map(|(iommu, ..)| iommu);
            let process = process(&device.own, iommu, &counters, here)?;
            let way = Way::of(&device.own, iommu, &counters)?;
            let (own, left) = Rest::of(device, counters, here);
            rest.push((own, process, way, left));
        }
        let iommu = front.as_ref().map(|(iommu, ..)| iommu.clone());
        if let Some((iommu, device, counters)) = front {
            let (own, left) = Rest::of(device, counters, here);
            daemon.rebuild_iommu(&iommu, own, left)?;
        }
        for (own, process, way, left) in rest {
            match way {
                Way::Direct => daemon.rebuild_device(own, process, Direct::default(), false, left),
                Way::Translated(dma) => daemon.rebuild_device(own, process, *dma, true, left),
                Way::Assigned(dma) => daemon.rebuild_device(own, process, dma, true, left),
                Way::Whole(dma) => daemon.rebuild_device(own, process, dma, false, left),
            }?;
        }
        // What a process was told when it was granted its mappings, it has done; or it has gone.
        let disk = DeviceId::new(BLK.0.address());
        let breach = iommu.and_then(|iommu| iommu.with_grants(disk, Grants::take_breach));
        if let Some(Some(breach)) = breach {
            return Err(io::Error::other(breach).into());
        }
        if let Some(path) = &here.memory.file {
            daemon.sockets.push(path.clone());
            daemon.machine.memory_file = Some(path.clone());
        }
        let names = [METRICS, CONTROL].map(|name| here.dir.join(name));
        let devices = daemon.bells.iter();
        let devices = devices.map(|(name, _)| daemon.machine.socket(name));
        let sockets: Vec<PathBuf> = devices.chain(names).collect();
        daemon.sockets.extend(sockets);
        daemon.metrics = Some(listener(handed.metrics)?);
        daemon.control = Some(listener(handed.control)?);
        Ok(daemon)
    }

    fn rebuild_iommu(
        &mut self,
        iommu: &Behind,
        own: Own,
        rest: Rest<'_>,
    ) -> Result<(), StateError> {
        let begun = rest.function.common.begun();
        let counters = Arc::clone(&rest.counters);
        // The memory first: what mappings lead to has to be there.
        match (iommu, own) {
            (Behind::Virtio(unit), Own::Iommu { snapshot, record }) => {
                let mut face = IommuDevice::new(unit.clone(), counters);
                if let Some(record) = record {
                    face.record(Recorder::restore(record, rest.here.caps.record_bytes)?);
                }
                face.complain(complaints(IOMMU, rest.here.log));
                self.machine.iommu = Some(IOMMU_SLOT);
                self.stand(face, unit.memory(), false, rest)?;
                unit.restore(&snapshot).map_err(StateError::Iommu)?;
                // With another driver's features, or with none, requests would mean something else.
                if !unit.has_accepted(begun.unwrap_or(0)) {
                    return Err(StateError::Register {
                        what: "virtio-iommu of another driver",
                    });
                }
            }
            (Behind::Para(unit), Own::PvIommu(state)) => {
                let face = PvIommuDevice::new(unit.clone(), counters);
                self.machine.devices.push((IOMMU_SLOT, PVIOMMU));
                self.stand(face, unit.memory(), false, rest)?;
                if state.running != begun.is_some() {
                    return Err(StateError::Register {
                        what: "para-virtual IOMMU of another driver",
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
        own: Own,
        process: Option<Front>,
        dma: A,
        translated: bool,
        rest: Rest<'_>,
    ) -> Result<(), StateError> {
        self.machine.devices.push(place(&own));
        let counters = Arc::clone(&rest.counters);
        match (own, process) {
            (Own::Blk { .. }, Some(front)) => self.stand(front, dma, translated, rest),
            (
                Own::Blk {
                    file,
                    read_only,
                    sectors,
                    kind: _,
                },
                None,
            ) => {
                let disk = disk(file, read_only, sectors, counters, rest.here)?;
                self.stand(disk, dma, translated, rest)
            }
            (Own::Net(state), _) => {
                let begun = rest.function.common.begun();
                let mut net = Net::restore(*state, begun, counters)?;
                // Another process's until this daemon serves and has ended.
                self.sockets.extend(net.link().name());
                self.stand(net, dma, translated, rest)
            }
            _ => self.stand(Rng::new(counters), dma, translated, rest),
        }
    }

    /// A device stands where it stood, with a thread ready that will serve it.
    fn stand<D: Device + Send + 'static, A: Dma + 'static>(
        &mut self,
        device: D,
        dma: A,
        translated: bool,
        rest: Rest<'_>,
    ) -> Result<(), StateError> {
        let function = VirtioPci::new(device, dma, translated, Arc::clone(&rest.counters));
        let (name, counters, log) = (rest.name, Arc::clone(&rest.counters), rest.here.log);
        self.prepare(name, rebuild_post(function, rest)?, counters, log)
    }
}

/// Devices that were rebuilt and are not served.
#[derive(Debug)]
pub struct Rebuilt(pub(super) Daemon);

impl Rebuilt {
    /// What a third process would be handed over.
    ///
    /// # Errors
    /// [`Unmovable`].
    pub fn save(&self) -> Result<Handed, Unmovable> {
        let Self(daemon) = self;
        let clone = |socket: &Option<UnixListener>| match socket {
            Some(socket) => socket.as_fd().try_clone_to_owned(),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        Ok(Handed {
            metrics: clone(&daemon.metrics)?,
            control: clone(&daemon.control)?,
            devices: daemon
                .ready
                .iter()
                .map(Ready::save)
                .collect::<Result<_, _>>()?,
        })
    }
}

/// All of a device that was handed over but what is its own.
struct Rest<'h> {
    name: &'static str,
    listener: OwnedFd,
    function: FunctionState,
    session: Option<SessionState>,
    counters: Arc<DeviceCounters>,
    here: Here<'h>,
}

impl<'h> Rest<'h> {
    fn of(device: HandedDevice, counters: Arc<DeviceCounters>, here: Here<'h>) -> (Own, Self) {
        let HandedDevice {
            own,
            listener,
            function,
            session,
            requests: _,
        } = device;
        let name = place(&own).1;
        (
            own,
            Self {
                name,
                listener,
                function,
                session,
                counters,
                here,
            },
        )
    }
}

fn rebuild_post<D: Device, A: Dma>(
    mut function: VirtioPci<D, A>,
    rest: Rest<'_>,
) -> Result<Post<VirtioPci<D, A>>, StateError> {
    function.restore(rest.function)?;
    let rules = rest.here.memory.clone();
    let socket = listener(rest.listener)?;
    let Some(session) = rest.session else {
        let post = Post::new(socket, function);
        return Ok(post.under(rules).open_to(rest.here.access));
    };
    let stream = socket_of(session.stream, false)?;
    let inbox = Inbox::with_part(&session.bytes, session.fds, session.too_many_fds);
    let inbox = inbox.ok_or(StateError::Register {
        what: "part of a message",
    })?;
    let ram = GuestRam::restore(rules.clone(), session.ranges).map_err(StateError::Memory)?;
    let conversation = Conversation {
        stream: UnixStream::from(stream),
        session: Session::resume(function, ram, session.agreed),
        inbox,
        words: Words::default(),
    };
    let post = Post::with(socket, conversation);
    Ok(post.under(rules).open_to(rest.here.access))
}

fn listener(fd: OwnedFd) -> Result<UnixListener, StateError> {
    socket_of(fd, true).map(UnixListener::from)
}

/// A local stream socket, one that listens or one that is connected.
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
