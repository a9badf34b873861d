//! Assembles messages from a byte stream.
//!
//! A message's descriptors arrive with its first bytes. The reader never reads past the end of the
//! current message, so each descriptor belongs to exactly one message.

use std::os::fd::OwnedFd;

use super::header::{FramingError, HEADER_BYTES, Header, MAX_FDS};

/// A protocol whose messages begin with a header of fixed length that states the message's length.
pub trait Framing {
    /// Length of the header in bytes.
    const HEADER_BYTES: usize;
    /// The decoded header.
    type Header: Copy;
    /// Reason why the rest of a stream cannot be parsed.
    type Error;

    /// Decodes the header from the first [`HEADER_BYTES`](Self::HEADER_BYTES) bytes of a message.
    ///
    /// # Errors
    /// The rest of the stream cannot be parsed, or is too long to read.
    fn decode(bytes: &[u8]) -> Result<Self::Header, Self::Error>;

    /// Returns the length of the whole message in bytes, including the header; the protocol bounds
    /// it.
    fn message_bytes(header: &Self::Header) -> usize;
}

/// The framing of vfio-user.
#[derive(Debug)]
pub enum VfioUser {}

impl Framing for VfioUser {
    const HEADER_BYTES: usize = HEADER_BYTES;
    type Header = Header;
    type Error = FramingError;

    fn decode(bytes: &[u8]) -> Result<Header, FramingError> {
        let short = FramingError::Short { size: 0 };
        Header::decode(bytes.first_chunk().ok_or(short)?)
    }

    fn message_bytes(header: &Header) -> usize {
        header.size
    }
}

/// Completeness of the descriptors that came with a piece of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReceivedFds {
    /// All descriptors were received.
    #[default]
    All,
    /// The kernel closed descriptors for which there was no room (`MSG_CTRUNC`, recvmsg(2)).
    Truncated,
}

/// A complete message.
#[derive(Debug)]
pub struct Message<H = Header> {
    /// Header of the message.
    pub header: H,
    /// Bytes after the header; the header states their length.
    pub body: Vec<u8>,
    /// Descriptors of the message, in order.
    pub fds: Vec<OwnedFd>,
    /// True if the message came with more descriptors than allowed; the excess ones were closed.
    pub too_many_fds: bool,
}

/// Assembler of vfio-user messages.
pub type Inbox = MessageAssembler<VfioUser>;

/// Assembles a message that arrives in pieces. Holds the bytes of at most one message.
#[derive(Debug)]
pub struct MessageAssembler<P: Framing> {
    bytes: Vec<u8>,
    header: Option<P::Header>,
    fds: Vec<OwnedFd>,
    too_many_fds: bool,
}

impl<P: Framing> Default for MessageAssembler<P> {
    fn default() -> Self {
        Self {
            bytes: Vec::new(),
            header: None,
            fds: Vec::new(),
            too_many_fds: false,
        }
    }
}

impl<P: Framing> MessageAssembler<P> {
    /// Returns the maximum number of bytes to read next. Never 0, and never past the end of the
    /// current message.
    pub fn bytes_wanted(&self) -> usize {
        let end = self
            .header
            .map_or(P::HEADER_BYTES, |header| P::message_bytes(&header));
        end.saturating_sub(self.bytes.len()).max(1)
    }

    /// Takes at most [`bytes_wanted`](Self::bytes_wanted) bytes and the descriptors that came with
    /// them. A message of which a piece was truncated has too many descriptors. Returns the message
    /// if it is complete.
    ///
    /// # Errors
    /// The caller must close the stream.
    pub fn feed(
        &mut self,
        bytes: &[u8],
        fds: impl IntoIterator<Item = OwnedFd>,
        received: ReceivedFds,
    ) -> Result<Option<Message<P::Header>>, P::Error> {
        self.bytes.extend(bytes);
        self.too_many_fds |= received == ReceivedFds::Truncated;
        for fd in fds {
            if self.fds.len() < MAX_FDS {
                self.fds.push(fd);
            } else {
                self.too_many_fds = true;
            }
        }
        if self.header.is_none()
            && let Some(header) = self.bytes.get(..P::HEADER_BYTES)
        {
            self.header = Some(P::decode(header)?);
        }
        let Some(header) = self.header else {
            return Ok(None);
        };
        if self.bytes.len() < P::message_bytes(&header) {
            return Ok(None);
        }
        self.header = None;
        let mut body = std::mem::take(&mut self.bytes);
        body.drain(..P::HEADER_BYTES.min(body.len()));
        Ok(Some(Message {
            header,
            body,
            fds: std::mem::take(&mut self.fds),
            too_many_fds: std::mem::take(&mut self.too_many_fds),
        }))
    }
}

impl Inbox {
    /// Returns the partial message: its bytes, its descriptors, and true if it had too many
    /// descriptors.
    pub fn part(&self) -> (&[u8], &[OwnedFd], bool) {
        (&self.bytes, &self.fds, self.too_many_fds)
    }

    /// Continues a partial message that another process has read. `None` if the bytes are not a
    /// partial message.
    pub fn with_part(bytes: &[u8], fds: Vec<OwnedFd>, too_many_fds: bool) -> Option<Self> {
        let mut inbox = Self::default();
        if bytes.is_empty() && (!fds.is_empty() || too_many_fds) {
            return None;
        }
        let received = if too_many_fds {
            ReceivedFds::Truncated
        } else {
            ReceivedFds::All
        };
        let whole = inbox.feed(bytes, fds, received).ok()?;
        whole.is_none().then_some(inbox)
    }
}
