//! The connection to QEMU's vfio-user client, with requests in both directions.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ringfence_types::{Access, IovaRange};
use ringfence_vfio_user::fields::{u16_at, u32_at};
use ringfence_vfio_user::{
    HEADER_BYTES, Inbox, MAX_DATA_BYTES, Message, ReceivedFds, VfioUserCommand,
};
use rustix::net::RecvFlags;

use ringfence_live::server::receive_bytes;

const TYPE_MASK: u32 = 0xf;
const TYPE_REPLY: u32 = 1;
const ERROR: u32 = 1 << 5;

/// Bytes between the header and the data of `DMA_READ` and `DMA_WRITE`, as the message size counts
/// them.
pub(super) const FIXED_BYTES: usize = 16;

/// A received message.
#[derive(Debug)]
pub(super) enum QemuMessage {
    /// A request of the client.
    Message(Message),
    /// The reply to a request of ours: its ID, and the body or an error number.
    Reply(u16, Result<Vec<u8>, u32>),
}

/// Position in the current message.
enum State {
    /// In the header; the bytes so far are buffered.
    Head,
    /// In a reply of this many bytes.
    Reply(usize),
    /// In a request, which the inbox assembles.
    Request,
}

pub(super) struct QemuLink {
    stream: UnixStream,
    inbox: Inbox,
    state: State,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    received: ReceivedFds,
    last_id: u16,
}

impl QemuLink {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            inbox: Inbox::default(),
            state: State::Head,
            bytes: Vec::new(),
            fds: Vec::new(),
            received: ReceivedFds::All,
            last_id: 0,
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Requests an access to memory on the device's behalf and returns the request's ID. `data` is
    /// the data to write, or a buffer of the length to read. It starts `gap` bytes before its
    /// specified position.
    pub(super) fn ask(
        &mut self,
        access: Access,
        range: IovaRange,
        data: &[u8],
        gap: usize,
    ) -> io::Result<u16> {
        let count = u32::try_from(data.len()).unwrap_or(u32::MAX);
        debug_assert!(count <= MAX_DATA_BYTES);
        self.last_id = self.last_id.wrapping_add(1);
        let command = match access {
            Access::Read => VfioUserCommand::DmaRead,
            Access::Write => VfioUserCommand::DmaWrite,
        };
        let mut body = Vec::with_capacity(FIXED_BYTES + data.len());
        body.extend(range.start().get().to_le_bytes());
        body.extend(u64::from(count).to_le_bytes());
        if access == Access::Write {
            body.truncate(FIXED_BYTES - gap);
            body.extend(data);
            body.resize(FIXED_BYTES + data.len(), 0);
        }
        let size = u32::try_from(HEADER_BYTES + body.len()).unwrap_or(u32::MAX);
        let mut message = Vec::with_capacity(HEADER_BYTES + body.len());
        message.extend(self.last_id.to_le_bytes());
        message.extend((command as u16).to_le_bytes());
        message.extend(size.to_le_bytes());
        message.extend([0; 8]);
        message.extend(body);
        self.send(&message)?;
        Ok(self.last_id)
    }

    /// Returns the next message. `None` if it is incomplete; fails at the end of the stream.
    pub(super) fn receive(&mut self) -> io::Result<Option<QemuMessage>> {
        loop {
            let wants = match self.state {
                State::Head => HEADER_BYTES - self.bytes.len(),
                State::Reply(size) => size - self.bytes.len(),
                State::Request => self.inbox.bytes_wanted(),
            };
            let Some(piece) = receive_bytes(&self.stream, wants, RecvFlags::DONTWAIT)? else {
                return Ok(None);
            };
            if piece.bytes.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let State::Request = self.state {
                if let Some(message) = self.put(&piece.bytes, piece.fds, piece.received)? {
                    return Ok(Some(message));
                }
                continue;
            }
            self.bytes.extend(piece.bytes);
            self.fds.extend(piece.fds);
            if piece.received == ReceivedFds::Truncated {
                self.received = piece.received;
            }
            if let Some(incoming) = self.advance()? {
                return Ok(Some(incoming));
            }
        }
    }

    fn advance(&mut self) -> io::Result<Option<QemuMessage>> {
        let field = |at| u32_at(&self.bytes, at).unwrap_or(0);
        if self.bytes.len() < HEADER_BYTES {
            return Ok(None);
        }
        let (size, flags) = (field(4) as usize, field(8));
        if flags & TYPE_MASK != TYPE_REPLY {
            self.state = State::Request;
            let head = std::mem::take(&mut self.bytes);
            let fds = std::mem::take(&mut self.fds);
            let received = std::mem::take(&mut self.received);
            return self.put(&head, fds, received);
        }
        if !(HEADER_BYTES..=HEADER_BYTES + FIXED_BYTES + MAX_DATA_BYTES as usize).contains(&size) {
            return Err(io::Error::other(format!("a reply of {size} bytes")));
        }
        self.state = State::Reply(size);
        if self.bytes.len() < size {
            return Ok(None);
        }
        let errno = field(12);
        let mut body = std::mem::take(&mut self.bytes);
        let id = u16_at(&body, 0).unwrap_or(0);
        body.drain(..HEADER_BYTES);
        self.fds.clear();
        self.state = State::Head;
        let result = if flags & ERROR == 0 {
            Ok(body)
        } else {
            Err(errno)
        };
        Ok(Some(QemuMessage::Reply(id, result)))
    }

    fn put(
        &mut self,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
        received: ReceivedFds,
    ) -> io::Result<Option<QemuMessage>> {
        let message = self.inbox.feed(bytes, fds, received);
        let message = message.map_err(io::Error::other)?;
        if message.is_some() {
            self.state = State::Head;
        }
        Ok(message.map(QemuMessage::Message))
    }
}
