//! Frames as datagrams between two sockets (QEMU's `-netdev dgram`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use rustix::net::SocketType;

use super::LinkState;
use super::{
    LONG_NAME, NetLink, ReceiveOutcome, SendOutcome, from_the_root, local_socket, never_waits,
    received,
};
use crate::access::bind_datagram;
use crate::event::PollSource;
use crate::saved_state::{HandOverBlocker, StateError};

/// A pair of sockets. Frames for which the peer has no room are lost, as on a wire.
#[derive(Debug)]
pub struct DatagramLink {
    socket: UnixDatagram,
    remote: PathBuf,
}

impl DatagramLink {
    /// Binds `local` and sends to `remote`, which need not exist yet.
    ///
    /// # Errors
    /// Binding failed.
    pub fn open(local: &Path, remote: &Path) -> io::Result<Self> {
        let local = from_the_root(local);
        let socket = bind_datagram(&local)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            remote: from_the_root(remote),
        })
    }

    pub(super) fn restore(socket: OwnedFd, remote: PathBuf) -> Result<Self, StateError> {
        if !remote.is_absolute() {
            return Err(StateError::Register { what: "link path" });
        }
        let socket = UnixDatagram::from(local_socket(socket, SocketType::DGRAM, false)?);
        let named = name(&socket).is_some_and(|name| name.is_absolute());
        if !named || !never_waits(&socket) {
            return Err(StateError::NotA { what: "socket" });
        }
        Ok(Self { socket, remote })
    }
}

impl NetLink for DatagramLink {
    fn send(&mut self, frame: &[u8]) -> SendOutcome {
        match self.socket.send_to(frame, &self.remote) {
            Ok(_) => SendOutcome::Taken,
            Err(_) => SendOutcome::Lost,
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> ReceiveOutcome {
        // The kernel truncates a datagram to the buffer, which is longer than any valid frame.
        match self.socket.recv(buffer) {
            Ok(got) => received(got),
            Err(_) => ReceiveOutcome::Nothing,
        }
    }

    fn waits_for(&self, input: bool, _output: bool) -> Option<PollSource<'_>> {
        Some(PollSource {
            fd: self.socket.as_fd(),
            input,
            output: false,
        })
    }

    fn name(&self) -> Option<PathBuf> {
        name(&self.socket)
    }

    /// Frames that were not received remain in the socket.
    fn save(&self) -> Result<LinkState, HandOverBlocker> {
        let named = self.name().is_some_and(|name| name.is_absolute());
        if !named || !self.remote.is_absolute() {
            return Err(LONG_NAME);
        }
        Ok(LinkState::Datagram {
            socket: self.socket.try_clone()?.into(),
            remote: self.remote.clone(),
        })
    }
}

fn name(socket: &UnixDatagram) -> Option<PathBuf> {
    let address = socket.local_addr().ok()?;
    address.as_pathname().map(Path::to_owned)
}
