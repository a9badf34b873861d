//! Messages between the two processes: a 16-byte header (type, bytes, descriptors, 0), the
//! descriptors, the bytes.
//!
//! The kernel limits the descriptors that one message carries and requires at least one byte with
//! them. Each batch of descriptors therefore travels with a separate byte.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringfence_vfio_user::fields::u32_at;
use ringfence_vfio_user::{MAX_FDS, ReceivedFds};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};

use super::state::MAX_STREAM_FDS;
use crate::saved_state::{MAX_STREAM_BYTES, wire_numbers};
use crate::server::{StopSignal, receive_bytes};

wire_numbers! {
    /// Type of a message.
    pub(super) enum MessageKind: u32 {
        Copy = 1,
        Stop = 2,
        Rebuilt = 3,
        Stream = 4,
        Released = 5,
        Kept = 6,
        Refused = 7,
        Orphaned = 8,
    }
}

/// A message of the hand-over.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: MessageKind,
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

impl Message {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Error of a channel.
#[derive(Debug, thiserror::Error)]
pub(super) enum ChannelError {
    /// The peer has closed the connection, or a system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The time limit expired.
    #[error("the peer did not answer in time")]
    TimeOut,
    /// This process was asked to stop.
    #[error("this process is about to stop")]
    Stopped,
    /// The peer sent a malformed message.
    #[error("malformed message")]
    Malformed,
}

const HEADER_BYTES: usize = 16;
/// Most bytes of one read.
const CHUNK_BYTES: usize = 64 * 1024;

/// Size limits of received messages. They depend on the peer's role: only the source sends streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    bytes: usize,
    fds: usize,
}

/// Messages of the destination carry no data.
pub(super) const DESTINATION_BOUNDS: Bounds = Bounds { bytes: 0, fds: 0 };
/// Messages of the source may carry a stream.
pub(super) const SOURCE_BOUNDS: Bounds = Bounds {
    bytes: MAX_STREAM_BYTES,
    fds: MAX_STREAM_FDS,
};

/// The connection between the two processes.
#[derive(Debug)]
pub(super) struct Channel<'a> {
    pub(super) stream: UnixStream,
    pub(super) bounds: Bounds,
    pub(super) stop: Option<&'a StopSignal>,
}

impl Channel<'_> {
    pub(super) fn send(
        &self,
        kind: MessageKind,
        bytes: &[u8],
        fds: &[OwnedFd],
        limit: Duration,
    ) -> Result<(), ChannelError> {
        let until = Instant::now() + limit;
        let length = |length: usize| u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes();
        let mut header = (kind as u32).to_le_bytes().to_vec();
        header.extend(length(bytes.len()));
        header.extend(length(fds.len()));
        header.extend([0; 4]);
        self.send_all(&header, until)?;
        for few in fds.chunks(MAX_FDS) {
            let few: Vec<BorrowedFd<'_>> = few.iter().map(AsFd::as_fd).collect();
            self.send_fds(&few, until)?;
        }
        self.send_all(bytes, until)
    }

    fn send_all(&self, mut bytes: &[u8], until: Instant) -> Result<(), ChannelError> {
        while !bytes.is_empty() {
            self.wait(PollFlags::OUT, until)?;
            match send(
                &self.stream,
                bytes,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(ChannelError::Io(error.into())),
            }
        }
        Ok(())
    }

    fn send_fds(&self, fds: &[BorrowedFd<'_>], until: Instant) -> Result<(), ChannelError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        loop {
            self.wait(PollFlags::OUT, until)?;
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(fds));
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.stream, &[io::IoSlice::new(&[0])], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(ChannelError::Io(error.into())),
            }
        }
    }

    pub(super) fn receive(&self, limit: Duration) -> Result<Message, ChannelError> {
        let until = Instant::now() + limit;
        let header = self.receive_all(HEADER_BYTES, until)?;
        let word = |at| u32_at(&header, at).ok_or(ChannelError::Malformed);
        let length = |at| word(at).map(|length| length as usize);
        let kind = MessageKind::from_number(word(0)?).ok_or(ChannelError::Malformed)?;
        let (bytes, count) = (length(4)?, length(8)?);
        if bytes > self.bounds.bytes || count > self.bounds.fds || word(12)? != 0 {
            return Err(ChannelError::Malformed);
        }
        let mut fds = Vec::new();
        while fds.len() < count {
            let expected = (count - fds.len()).min(MAX_FDS);
            let piece = self.receive_bytes(1, until)?;
            if piece.received != ReceivedFds::All || piece.fds.len() != expected {
                return Err(ChannelError::Malformed);
            }
            fds.extend(piece.fds);
        }
        let bytes = self.receive_all(bytes, until)?;
        Ok(Message { kind, bytes, fds })
    }

    /// Receives bytes that must carry no descriptors.
    fn receive_all(&self, count: usize, until: Instant) -> Result<Vec<u8>, ChannelError> {
        let mut bytes = Vec::new();
        while bytes.len() < count {
            let piece = self.receive_bytes((count - bytes.len()).min(CHUNK_BYTES), until)?;
            if piece.received != ReceivedFds::All || !piece.fds.is_empty() {
                return Err(ChannelError::Malformed);
            }
            bytes.extend(piece.bytes);
        }
        Ok(bytes)
    }

    fn receive_bytes(
        &self,
        wants: usize,
        until: Instant,
    ) -> Result<crate::server::ReceivedBytes, ChannelError> {
        loop {
            self.wait(PollFlags::IN, until)?;
            match receive_bytes(&self.stream, wants, RecvFlags::DONTWAIT)? {
                None => {}
                Some(piece) if piece.bytes.is_empty() => {
                    return Err(ChannelError::Io(io::ErrorKind::UnexpectedEof.into()));
                }
                Some(piece) => return Ok(piece),
            }
        }
    }

    fn wait(&self, flags: PollFlags, until: Instant) -> Result<(), ChannelError> {
        let mut fds = vec![PollFd::new(&self.stream, flags)];
        fds.extend(self.stop.map(|stop| PollFd::new(stop.fd(), PollFlags::IN)));
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).unwrap_or_default();
            match poll(&mut fds, Some(&left)) {
                Ok(0) => return Err(ChannelError::TimeOut),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(ChannelError::Io(error.into())),
            }
            let came = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
            return if came(1) {
                Err(ChannelError::Stopped)
            } else {
                Ok(())
            };
        }
    }
}
