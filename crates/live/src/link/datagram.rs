//! Frames as datagrams between two sockets (QEMU's `-netdev dgram`).

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use super::{Link, Receiving, Sending, received};
use crate::left_behind;
use crate::virtio::Awaited;

/// A pair of sockets. What the other side has no room for is lost, as on a wire.
#[derive(Debug)]
pub struct Datagram {
    socket: UnixDatagram,
    local: PathBuf,
    remote: PathBuf,
}

impl Datagram {
    /// Binds `local`; what is sent goes to `remote`, which need not be there yet.
    ///
    /// # Errors
    /// What binding meets.
    pub fn open(local: &Path, remote: &Path) -> io::Result<Self> {
        left_behind::clear(local)?;
        let socket = UnixDatagram::bind(local)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            local: local.to_owned(),
            remote: remote.to_owned(),
        })
    }
}

impl Link for Datagram {
    fn send(&mut self, frame: &[u8]) -> Sending {
        match self.socket.send_to(frame, &self.remote) {
            Ok(_) => Sending::Taken,
            Err(_) => Sending::Lost,
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Receiving {
        // What is longer than the buffer is cut, and the buffer is longer than any frame.
        match self.socket.recv(buffer) {
            Ok(got) => received(got),
            Err(_) => Receiving::Nothing,
        }
    }

    fn waits_for(&self, input: bool, _output: bool) -> Option<Awaited<'_>> {
        Some(Awaited {
            fd: self.socket.as_fd(),
            input,
            output: false,
        })
    }
}

impl Drop for Datagram {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.local);
    }
}
