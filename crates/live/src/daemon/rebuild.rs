//! Devices out of what another process has handed over.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ringfence_types::DeviceId;
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::ready::Ready;
use super::way::{Way, device_id, disk, is_assigned, place, process};
use super::{BLK, Daemon, Here, IOMMU_SLOT, METRICS, complaints};
use crate::counters::DeviceCounters;
use crate::dma::{Direct, Dma};
use crate::guest::{IOMMU, PVIOMMU};
use crate::handover::{
    CONTROL, Handed, HandedDevice, Limits, Own, SessionState, StateError, Take, TakeOverError,
    Taken, Unmovable,
};
use crate::iommu::{Behind, Iommu, Recorder};
use crate::isolate::{Front, Grants};
use crate::memory::{GuestRam, Locked};
use crate::pviommu::PvIommu;
use crate::server::{Conversation, Event, Post, Words};
use crate::session::Session;
use crate::virtio::iommu::IommuDevice;
use crate::virtio::net::Net;
use crate::virtio::pviommu::PvIommuDevice;
use crate::virtio::rng::Rng;
use crate::virtio::{Device, VirtioPci};
use crate::wire::Inbox;

/// Between two copies, which each cost every device a turn.
const BREATH: Duration = Duration::from_millis(20);
/// The longest that is copied for want of requests.
const COPYING: Duration = Duration::from_secs(120);

impl Daemon {
    /// Takes the devices over that another process serves in the directory, from its guest's view without an interruption: it has them until they stand rebuilt
    /// here. They are copied, and rebuilt, while they work, at least once, and until `meanwhile` requests were completed; then they are stopped.
    ///
    /// # Errors
    /// [`TakeOverError`]: the other process goes on with them.
    pub fn take_over(
        here: Here<'_>,
        meanwhile: u64,
    ) -> Result<(Self, Taken), (PathBuf, TakeOverError)> {
        let path = here.dir.join(CONTROL);
        taken_over(here, &path, meanwhile).map_err(|error| (path, error))
    }

    /// Whether what another process says it has could be served here. Nothing of it is.
    ///
    /// # Errors
    /// [`StateError`]: what is wrong with it.
    pub fn rehearse(here: Here<'_>, handed: Handed) -> Result<Rebuilt, StateError> {
        Self::rebuild(here, handed).map(Rebuilt)
    }

    /// Holds all of a take-over's conversation with the process at the other end of `first`, which lets go of its devices at the end of it, and serves
    /// none of them.
    ///
    /// # Errors
    /// [`TakeOverError`]: the other process goes on with them.
    pub fn rehearse_take_over(first: UnixStream, here: Here<'_>) -> Result<Rebuilt, TakeOverError> {
        let taken = converse(&Take::with(first), here, 0)?;
        Ok(Rebuilt(taken.daemon))
    }

    /// The devices of `handed`, which stand still until they are [`launch`](Self::launch)ed.
    pub(super) fn rebuild(here: Here<'_>, handed: Handed) -> Result<Self, StateError> {
        here.check(&handed.devices)?;
        let mut daemon = Self::empty(here.dir, None)?;
        daemon.rules = here.memory.clone();
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
            rest.push(((device, process), way, counters));
        }
        let iommu = front.as_ref().map(|(iommu, ..)| iommu.clone());
        if let Some((iommu, device, counters)) = front {
            daemon.rebuild_iommu(&iommu, device, counters, here)?;
        }
        for (device, way, counters) in rest {
            match way {
                Way::Direct => {
                    daemon.rebuild_device(device, Direct::default(), false, counters, here)
                }
                Way::Translated(dma) => daemon.rebuild_device(device, *dma, true, counters, here),
                Way::Assigned(dma) => daemon.rebuild_device(device, dma, true, counters, here),
                Way::Whole(dma) => daemon.rebuild_device(device, dma, false, counters, here),
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
        device: HandedDevice,
        counters: Arc<DeviceCounters>,
        here: Here<'_>,
    ) -> Result<(), StateError> {
        let begun = device.function.common.begun();
        match (iommu, device.own) {
            (Behind::Virtio(unit), Own::Iommu { snapshot, record }) => {
                let mut face = IommuDevice::new(unit.clone(), Arc::clone(&counters));
                if let Some(record) = record {
                    face.record(Recorder::restore(record)?);
                }
                face.complain(complaints(IOMMU, here.log));
                let function = VirtioPci::new(face, unit.memory(), false, Arc::clone(&counters));
                let parts = (device.listener, device.function, device.session);
                // The memory first: what mappings lead to has to be there.
                let post = rebuild_post(function, parts, here)?;
                unit.restore(&snapshot).map_err(StateError::Iommu)?;
                // With another driver's features, or with none, requests would mean something else.
                if !unit.has_accepted(begun.unwrap_or(0)) {
                    return Err(StateError::Register {
                        what: "virtio-iommu of another driver",
                    });
                }
                self.machine.iommu = Some(IOMMU_SLOT);
                self.prepare(IOMMU, post, counters, here.log)
            }
            (Behind::Para(unit), Own::PvIommu(state)) => {
                let face = PvIommuDevice::new(unit.clone(), Arc::clone(&counters));
                let function = VirtioPci::new(face, unit.memory(), false, Arc::clone(&counters));
                let parts = (device.listener, device.function, device.session);
                let post = rebuild_post(function, parts, here)?;
                if state.running != begun.is_some() {
                    return Err(StateError::Register {
                        what: "para-virtual IOMMU of another driver",
                    });
                }
                unit.unit().restore(&state)?;
                self.machine.devices.push((IOMMU_SLOT, PVIOMMU));
                self.prepare(PVIOMMU, post, counters, here.log)
            }
            _ => Err(StateError::Register { what: "IOMMU" }),
        }
    }

    fn rebuild_device<A: Dma + 'static>(
        &mut self,
        (device, process): (HandedDevice, Option<Front>),
        dma: A,
        translated: bool,
        counters: Arc<DeviceCounters>,
        here: Here<'_>,
    ) -> Result<(), StateError> {
        let (slot, name) = place(&device.own);
        self.machine.devices.push((slot, name));
        let begun = device.function.common.begun();
        let parts = (device.listener, device.function, device.session);
        let known = Arc::clone(&counters);
        match device.own {
            Own::Blk {
                file,
                read_only,
                sectors,
                kind: _,
            } => {
                if let Some(front) = process {
                    let function = VirtioPci::new(front, dma, translated, Arc::clone(&counters));
                    let post = rebuild_post(function, parts, here)?;
                    return self.prepare(name, post, counters, here.log);
                }
                let disk = disk(file, read_only, sectors, known, here)?;
                let function = VirtioPci::new(disk, dma, translated, Arc::clone(&counters));
                self.prepare(
                    name,
                    rebuild_post(function, parts, here)?,
                    counters,
                    here.log,
                )
            }
            Own::Net(state) => {
                let mut net = Net::restore(*state, begun, known)?;
                // Another process's until this daemon serves and has ended.
                self.sockets.extend(net.link().name());
                let function = VirtioPci::new(net, dma, translated, Arc::clone(&counters));
                self.prepare(
                    name,
                    rebuild_post(function, parts, here)?,
                    counters,
                    here.log,
                )
            }
            _ => {
                let function =
                    VirtioPci::new(Rng::new(known), dma, translated, Arc::clone(&counters));
                self.prepare(
                    name,
                    rebuild_post(function, parts, here)?,
                    counters,
                    here.log,
                )
            }
        }
    }
}

/// Devices that were rebuilt and are not served.
#[derive(Debug)]
pub struct Rebuilt(Daemon);

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

/// Devices that were taken over and stand still.
struct Conversed {
    daemon: Daemon,
    asked: Instant,
    /// The pause is not over yet.
    taken: Taken,
}

fn taken_over(
    here: Here<'_>,
    control: &Path,
    meanwhile: u64,
) -> Result<(Daemon, Taken), TakeOverError> {
    let Conversed {
        mut daemon,
        asked,
        mut taken,
    } = converse(&Take::connect(control)?, here, meanwhile)?;
    daemon.launch();
    taken.pause = asked.elapsed();
    // They are here, whatever becomes of the next hand-over.
    if let Err(error) = daemon.offer_hand_over(Limits::default(), here.log) {
        (here.log)("hand-over", &Event::Kept(&error.to_string()));
    }
    Ok((daemon, taken))
}

/// When it returns devices, the other process has let go of them.
fn converse(take: &Take, here: Here<'_>, meanwhile: u64) -> Result<Conversed, TakeOverError> {
    let begun = Instant::now();
    let first = take.copy()?;
    let before = first.requests();
    // Whatever would fail, fails here, while the devices work.
    Daemon::rehearse(here, first)?;
    let mut copies = 1;
    let mut completed = 0;
    while completed < meanwhile {
        if begun.elapsed() > COPYING {
            return Err(TakeOverError::TimeOut);
        }
        thread::sleep(BREATH);
        let handed = take.copy()?;
        completed = handed.requests().saturating_sub(before);
        Daemon::rehearse(here, handed)?;
        copies += 1;
    }
    let copying = begun.elapsed();
    let asked = Instant::now();
    let (taking, handed) = take.stop()?;
    let stopping = asked.elapsed();
    let meanwhile = handed.requests().saturating_sub(before);
    let daemon = Daemon::rebuild(here, handed)?;
    let rebuilding = asked.elapsed().saturating_sub(stopping);
    let bytes = taking.bytes;
    taking.confirm()?;
    Ok(Conversed {
        daemon,
        asked,
        taken: Taken {
            copies,
            copying,
            meanwhile,
            pause: Duration::ZERO,
            stopping,
            rebuilding,
            bytes,
        },
    })
}

type Parts = (
    OwnedFd,
    crate::handover::FunctionState,
    Option<SessionState>,
);

fn rebuild_post<D: Device, A: Dma>(
    mut function: VirtioPci<D, A>,
    (socket, registers, session): Parts,
    here: Here<'_>,
) -> Result<Post<VirtioPci<D, A>>, StateError> {
    function.restore(registers)?;
    let rules = here.memory.clone();
    let socket = listener(socket)?;
    let Some(session) = session else {
        return Ok(Post::new(socket, function).under(rules));
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
    Ok(Post::with(socket, conversation).under(rules))
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
