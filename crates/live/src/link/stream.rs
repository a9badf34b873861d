//! Frames over a stream socket (QEMU's `-netdev stream`), to one peer at a time.

use std::fs;
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use super::framing::{Deframed, Deframer, Framer};
use super::{Link, Receiving, Sending};
use crate::left_behind;
use crate::virtio::Awaited;

/// Bytes that are read at once: some frames.
const CHUNK_BYTES: usize = 16 * 1024;

/// A socket. Whoever opens a path first listens there; the other connects. The listener takes another peer when one has gone; whoever connected and lost
/// its peer has none any more.
#[derive(Debug)]
pub struct Stream {
    listener: Option<(UnixListener, PathBuf)>,
    peer: Option<Peer>,
}

#[derive(Debug)]
struct Peer {
    stream: UnixStream,
    deframer: Deframer,
    /// What was read and not yet taken apart: from `taken` on.
    chunk: Vec<u8>,
    taken: usize,
    framer: Framer,
}

impl Stream {
    /// Connects to whoever listens at `path`, or listens there.
    ///
    /// # Errors
    /// What connecting and listening meet.
    pub fn open(path: &Path) -> io::Result<Self> {
        match UnixStream::connect(path) {
            Ok(stream) => {
                return Ok(Self {
                    listener: None,
                    peer: Some(Peer::new(stream)?),
                });
            }
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound => {}
                // Somebody who is no more has listened there.
                io::ErrorKind::ConnectionRefused => left_behind::clear(path)?,
                _ => return Err(error),
            },
        }
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener: Some((listener, path.to_owned())),
            peer: None,
        })
    }

    /// Whether there is a peer.
    pub fn connected(&self) -> bool {
        self.peer.is_some()
    }

    fn accept(&mut self) {
        let Some((listener, _)) = &self.listener else {
            return;
        };
        if let Ok((stream, _)) = listener.accept() {
            self.peer = Peer::new(stream).ok();
        }
    }
}

impl Link for Stream {
    fn send(&mut self, frame: &[u8]) -> Sending {
        let Some(peer) = &mut self.peer else {
            return Sending::Lost;
        };
        match peer.send(frame) {
            Ok(true) => Sending::Taken,
            Ok(false) => Sending::Full,
            Err(Gone) => {
                self.peer = None;
                Sending::Lost
            }
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Receiving {
        let Some(peer) = &mut self.peer else {
            self.accept();
            return Receiving::Nothing;
        };
        match peer.receive(buffer) {
            Ok(received) => received,
            Err(Gone) => {
                self.peer = None;
                Receiving::Nothing
            }
        }
    }

    fn waits_for(&self, input: bool, output: bool) -> Option<Awaited<'_>> {
        match (&self.peer, &self.listener) {
            (Some(peer), _) => Some(Awaited {
                fd: peer.stream.as_fd(),
                input,
                output: output || peer.framer.is_in_frame(),
            }),
            (None, Some((listener, _))) => Some(Awaited {
                fd: listener.as_fd(),
                input,
                output: false,
            }),
            (None, None) => None,
        }
    }

    fn came(&mut self) {
        if let Some(peer) = &mut self.peer
            && peer.go_on().is_err()
        {
            self.peer = None;
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some((_, path)) = &self.listener {
            let _ = fs::remove_file(path);
        }
    }
}

/// The peer went, or does not speak this language.
struct Gone;

impl Peer {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            deframer: Deframer::default(),
            chunk: Vec::with_capacity(CHUNK_BYTES),
            taken: 0,
            framer: Framer::default(),
        })
    }

    /// Whether it was taken.
    fn send(&mut self, frame: &[u8]) -> Result<bool, Gone> {
        let stream = &self.stream;
        self.framer.send(frame, |parts| write(stream, parts))
    }

    fn go_on(&mut self) -> Result<(), Gone> {
        let stream = &self.stream;
        self.framer.go_on(|parts| write(stream, parts))
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<Receiving, Gone> {
        loop {
            let mut piece = self.chunk.get(self.taken..).unwrap_or(&[]);
            let before = piece.len();
            let deframed = self.deframer.take(&mut piece, buffer);
            self.taken += before - piece.len();
            match deframed.map_err(|_| Gone)? {
                Deframed::Frame(bytes) => return Ok(Receiving::Frame(bytes)),
                Deframed::Dropped => return Ok(Receiving::Dropped),
                Deframed::Part => {}
            }
            self.taken = 0;
            self.chunk.resize(CHUNK_BYTES, 0);
            let got = recv(&self.stream, &mut self.chunk, RecvFlags::DONTWAIT);
            self.chunk.truncate(got.map_or(0, |(bytes, _)| bytes));
            match got {
                Ok((0, _)) => return Err(Gone),
                Ok(_) => {}
                Err(Errno::AGAIN | Errno::INTR) => return Ok(Receiving::Nothing),
                Err(_) => return Err(Gone),
            }
        }
    }
}

/// Bytes that were written, perhaps none.
fn write(stream: &UnixStream, parts: &[IoSlice<'_>]) -> Result<usize, Gone> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match sendmsg(stream, parts, &mut SendAncillaryBuffer::default(), flags) {
        Ok(sent) => Ok(sent),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(_) => Err(Gone),
    }
}
