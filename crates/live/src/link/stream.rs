//! Frames over a stream socket (QEMU's `-netdev stream`), with one peer at a time.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, SocketType, recv, sendmsg};

use super::framing::{Deframed, Deframer, Framer};
use super::{
    LONG_NAME, NetLink, ReceiveOutcome, SendOutcome, from_the_root, local_socket, never_waits,
};
use super::{LinkState, PeerState};
use crate::access::SocketAccess;
use crate::event::PollSource;
use crate::saved_state::{HandOverBlocker, StateError};
use crate::stale_socket;

/// Bytes per read: room for several frames.
pub const CHUNK_BYTES: usize = 16 * 1024;

/// A stream socket. The side that opens a path first listens; the other connects. The listener
/// accepts a new peer after a disconnect; the connecting side does not reconnect.
#[derive(Debug)]
pub struct StreamLink {
    listener: Option<UnixListener>,
    peer: Option<Peer>,
}

#[derive(Debug)]
struct Peer {
    stream: UnixStream,
    deframer: Deframer,
    /// Bytes that were read; those before `consumed` are parsed.
    chunk: Vec<u8>,
    consumed: usize,
    framer: Framer,
}

impl StreamLink {
    /// Connects to the listener at `path`, or listens there if there is no listener.
    ///
    /// # Errors
    /// Connecting or listening failed.
    pub fn open(path: &Path) -> io::Result<Self> {
        let path = &from_the_root(path);
        match UnixStream::connect(path) {
            Ok(stream) => {
                return Ok(Self {
                    listener: None,
                    peer: Some(Peer::new(stream)?),
                });
            }
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound => {}
                // The listening process has ended.
                io::ErrorKind::ConnectionRefused => stale_socket::clear(path)?,
                _ => return Err(error),
            },
        }
        let listener = SocketAccess::OwnUser.listen(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener: Some(listener),
            peer: None,
        })
    }

    pub(super) fn restore(
        listener: Option<OwnedFd>,
        peer: Option<PeerState>,
    ) -> Result<Self, StateError> {
        let listener = listener
            .map(|fd| local_socket(fd, SocketType::STREAM, true))
            .transpose()?
            .map(UnixListener::from);
        let fits = |one: &UnixListener| {
            name(one).is_some_and(|name| name.is_absolute()) && never_waits(one)
        };
        if !listener.as_ref().is_none_or(fits) {
            return Err(StateError::NotA { what: "socket" });
        }
        Ok(Self {
            listener,
            peer: peer.map(Peer::restore).transpose()?,
        })
    }

    /// Returns true if a peer is connected.
    pub fn connected(&self) -> bool {
        self.peer.is_some()
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        if let Ok((stream, _)) = listener.accept()
            && SocketAccess::OwnUser.admit(&stream).is_ok()
        {
            self.peer = Peer::new(stream).ok();
        }
    }
}

impl NetLink for StreamLink {
    fn send(&mut self, frame: &[u8]) -> SendOutcome {
        let Some(peer) = &mut self.peer else {
            return SendOutcome::Lost;
        };
        match peer.send(frame) {
            Ok(true) => SendOutcome::Taken,
            Ok(false) => SendOutcome::Full,
            Err(PeerLost) => {
                self.peer = None;
                SendOutcome::Lost
            }
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> ReceiveOutcome {
        let Some(peer) = &mut self.peer else {
            self.accept();
            return ReceiveOutcome::Nothing;
        };
        match peer.receive(buffer) {
            Ok(received) => received,
            Err(PeerLost) => {
                self.peer = None;
                ReceiveOutcome::Nothing
            }
        }
    }

    fn waits_for(&self, input: bool, output: bool) -> Option<PollSource<'_>> {
        match (&self.peer, &self.listener) {
            (Some(peer), _) => Some(PollSource {
                fd: peer.stream.as_fd(),
                input,
                output: output || peer.framer.is_in_frame(),
            }),
            (None, Some(listener)) => Some(PollSource {
                fd: listener.as_fd(),
                input,
                output: false,
            }),
            (None, None) => None,
        }
    }

    fn on_ready(&mut self) {
        if let Some(peer) = &mut self.peer
            && peer.go_on().is_err()
        {
            self.peer = None;
        }
    }

    fn name(&self) -> Option<PathBuf> {
        self.listener.as_ref().and_then(name)
    }

    fn save(&self) -> Result<LinkState, HandOverBlocker> {
        let listener = self.listener.as_ref();
        if self.name().is_some_and(|name| !name.is_absolute()) {
            return Err(LONG_NAME);
        }
        Ok(LinkState::Stream {
            listener: listener
                .map(|one| one.as_fd().try_clone_to_owned())
                .transpose()?,
            peer: self.peer.as_ref().map(Peer::save).transpose()?,
        })
    }
}

fn name(listener: &UnixListener) -> Option<PathBuf> {
    let address = listener.local_addr().ok()?;
    address.as_pathname().map(Path::to_owned)
}

/// The peer disconnected or sent a malformed stream.
struct PeerLost;

impl Peer {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            deframer: Deframer::default(),
            chunk: Vec::with_capacity(CHUNK_BYTES),
            consumed: 0,
            framer: Framer::default(),
        })
    }

    /// Returns the peer with its partially received and sent frames; all other data is in the
    /// socket.
    fn save(&self) -> io::Result<PeerState> {
        let (begun, missing) = self.deframer.part();
        Ok(PeerState {
            stream: self.stream.as_fd().try_clone_to_owned()?,
            begun,
            missing: u32::try_from(missing).unwrap_or(u32::MAX),
            unread: self.chunk.get(self.consumed..).unwrap_or(&[]).to_vec(),
            unsent: self.framer.unsent().to_vec(),
        })
    }

    fn restore(state: PeerState) -> Result<Self, StateError> {
        let part = |what| StateError::Register { what };
        let missing = usize::try_from(state.missing).unwrap_or(usize::MAX);
        let deframer = Deframer::with_part(&state.begun, missing);
        let stream = local_socket(state.stream, SocketType::STREAM, false)?;
        Ok(Self {
            stream: UnixStream::from(stream),
            deframer: deframer.ok_or(part("partial frame"))?,
            chunk: state.unread,
            consumed: 0,
            framer: Framer::with_unsent(state.unsent).ok_or(part("unsent frame"))?,
        })
    }

    /// Returns true if the frame was accepted.
    fn send(&mut self, frame: &[u8]) -> Result<bool, PeerLost> {
        let stream = &self.stream;
        self.framer.send(frame, |parts| write(stream, parts))
    }

    fn go_on(&mut self) -> Result<(), PeerLost> {
        let stream = &self.stream;
        self.framer.flush(|parts| write(stream, parts))
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<ReceiveOutcome, PeerLost> {
        loop {
            let mut piece = self.chunk.get(self.consumed..).unwrap_or(&[]);
            let before = piece.len();
            let deframed = self.deframer.feed(&mut piece, buffer);
            self.consumed += before - piece.len();
            match deframed.map_err(|_| PeerLost)? {
                Deframed::Frame(bytes) => return Ok(ReceiveOutcome::Frame(bytes)),
                Deframed::Dropped => return Ok(ReceiveOutcome::Dropped),
                Deframed::Part => {}
            }
            self.consumed = 0;
            self.chunk.resize(CHUNK_BYTES, 0);
            let got = recv(&self.stream, &mut self.chunk, RecvFlags::DONTWAIT);
            self.chunk.truncate(got.map_or(0, |(bytes, _)| bytes));
            match got {
                Ok((0, _)) => return Err(PeerLost),
                Ok(_) => {}
                Err(Errno::AGAIN | Errno::INTR) => return Ok(ReceiveOutcome::Nothing),
                Err(_) => return Err(PeerLost),
            }
        }
    }
}

/// Returns the number of bytes written, possibly zero.
fn write(stream: &UnixStream, parts: &[IoSlice<'_>]) -> Result<usize, PeerLost> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match sendmsg(stream, parts, &mut SendAncillaryBuffer::default(), flags) {
        Ok(sent) => Ok(sent),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(_) => Err(PeerLost),
    }
}
