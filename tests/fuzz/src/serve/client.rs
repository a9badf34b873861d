//! A client's connection to one of the daemon's sockets.

use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ringfence_vfio_user::HEADER_BYTES;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Time limit for any answer, and for the daemon to read what was sent.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// An open connection.
pub(super) struct Client(UnixStream);

/// Result of sending a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// The daemon replied.
    Answered { refused: bool },
    /// The message wants no reply.
    Sent,
    /// The daemon closed the connection.
    Closed,
}

impl Client {
    pub(super) fn connect(path: &Path) -> Option<Self> {
        let stream = match UnixStream::connect(path) {
            Ok(stream) => stream,
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => panic!("{}: {error}", path.display()),
        };
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        stream.set_write_timeout(Some(PATIENCE)).expect("a limit");
        Some(Self(stream))
    }

    /// Sends bytes, the descriptors with the first of them. False if the daemon has closed the
    /// connection.
    pub(super) fn send(&mut self, bytes: &[u8], fds: &[OwnedFd]) -> bool {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut fds = fds.as_slice();
        let mut rest = bytes;
        while !rest.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "room");
            }
            let pieces = [IoSlice::new(rest)];
            match sendmsg(&self.0, &pieces, &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = &rest[sent..],
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => panic!("the daemon does not read a message"),
                Err(_) => return false,
            }
            fds = &[];
        }
        true
    }

    /// Sends a message, and receives its reply if it wants one.
    pub(super) fn exchange(&mut self, bytes: &[u8], fds: &[OwnedFd], reply: bool) -> Exchange {
        if !self.send(bytes, fds) {
            return Exchange::Closed;
        }
        if !reply {
            return Exchange::Sent;
        }
        let mut header = [0; HEADER_BYTES];
        if !self.fill(&mut header) {
            return Exchange::Closed;
        }
        assert_eq!(header[..2], bytes[..2], "the reply to another message");
        let size = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        let body = size.checked_sub(HEADER_BYTES).expect("a whole header");
        if !self.fill(&mut vec![0; body]) {
            return Exchange::Closed;
        }
        Exchange::Answered {
            refused: header[8] & 0x20 != 0,
        }
    }

    /// Receives bytes; false at the end of the connection.
    pub(super) fn fill(&mut self, bytes: &mut [u8]) -> bool {
        match self.0.read_exact(bytes) {
            Ok(()) => true,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("no answer within {PATIENCE:?}")
            }
            Err(_) => false,
        }
    }

    /// Ends the sending side and reads until the daemon closes the connection. True if it sent
    /// anything.
    pub(super) fn drain(&mut self) -> bool {
        let _ = self.0.shutdown(std::net::Shutdown::Write);
        let mut bytes = Vec::new();
        match self.0.read_to_end(&mut bytes) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the connection stays open after its end for {PATIENCE:?}")
            }
            _ => !bytes.is_empty(),
        }
    }
}
