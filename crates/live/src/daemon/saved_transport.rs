//! A handed-over device without its own state: registers, sockets and the client's session.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use ringfence_vfio_user::Inbox;
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::LocalConfig;
use super::dma_path::slot_and_name;
use crate::counters::DeviceCounters;
use crate::handover::{DeviceState, FunctionState, SavedDevice, SessionState, StateError};
use crate::memory::GuestRam;
use crate::server::{ClientConnection, ClientSlot, LogBudget, PolledFunction};
use crate::session::Session;

/// The socket of a handed-over device, and its client's session.
pub(super) struct SavedConnection {
    listener: OwnedFd,
    session: Option<SessionState>,
}

/// A handed-over device without its own state: registers, sockets and session.
pub(super) struct SavedTransport<'h> {
    pub(super) name: &'static str,
    pub(super) function: FunctionState,
    pub(super) connection: SavedConnection,
    pub(super) counters: Arc<DeviceCounters>,
    pub(super) config: LocalConfig<'h>,
}

impl<'h> SavedTransport<'h> {
    pub(super) fn of(
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
                function,
                connection: SavedConnection { listener, session },
                counters,
                config,
            },
        )
    }

    /// Returns the features that the driver accepted if it has begun to use the device.
    pub(super) fn begun(&self) -> Option<u64> {
        match &self.function {
            FunctionState::Virtio(state) => state.common.begun(),
            FunctionState::Plain(_) => None,
        }
    }
}

/// Restores the connection to the client of a restored function.
///
/// # Errors
/// [`StateError`] if a descriptor or the memory is invalid.
pub(super) fn rebuild_slot<F: PolledFunction>(
    function: F,
    saved: SavedConnection,
    config: LocalConfig<'_>,
) -> Result<ClientSlot<F>, StateError> {
    let rules = config.memory.clone();
    let socket = listener(saved.listener)?;
    let Some(session) = saved.session else {
        let slot = ClientSlot::new(socket, function);
        return Ok(slot.with_memory_rules(rules).with_access(config.access));
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
    Ok(slot.with_memory_rules(rules).with_access(config.access))
}

pub(super) fn listener(fd: OwnedFd) -> Result<UnixListener, StateError> {
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
