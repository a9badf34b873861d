//! Messages out of a byte stream.
//!
//! Descriptors that travel with a message arrive with its first bytes. So the reader never asks for
//! more than belongs to the message in hand: then it is certain which message a descriptor came
//! with.

use std::os::fd::OwnedFd;

use super::header::{FramingError, HEADER_BYTES, Header, MAX_FDS};

/// What stands before every message of a protocol, and says how long it is.
pub trait Framed: Copy {
    /// Its own bytes.
    const BYTES: usize;
    /// Why a stream cannot be followed any further.
    type Error;

    /// Reads it from the first [`BYTES`](Self::BYTES) bytes of a message.
    ///
    /// # Errors
    /// If nothing after it can be understood, or is worth reading.
    fn decode_from(bytes: &[u8]) -> Result<Self, Self::Error>;

    /// Bytes of the whole message, its own included; bounded by the protocol.
    fn message_bytes(&self) -> usize;
}

impl Framed for Header {
    const BYTES: usize = HEADER_BYTES;
    type Error = FramingError;

    fn decode_from(bytes: &[u8]) -> Result<Self, FramingError> {
        let short = FramingError::Short { size: 0 };
        Self::decode(bytes.first_chunk().ok_or(short)?)
    }

    fn message_bytes(&self) -> usize {
        self.size
    }
}

/// One message.
#[derive(Debug)]
pub struct Message<H = Header> {
    /// Its header.
    pub header: H,
    /// What follows the header, of exactly the length that the header states.
    pub body: Vec<u8>,
    /// The descriptors that came with it, in their order.
    pub fds: Vec<OwnedFd>,
    /// More descriptors came than a message may carry; those beyond were closed.
    pub too_many_fds: bool,
}

/// A message of vfio-user that arrives piece by piece.
pub type Inbox = MessageAssembler<Header>;

/// A message that arrives piece by piece. Holds one message's bytes at most.
#[derive(Debug)]
pub struct MessageAssembler<H> {
    bytes: Vec<u8>,
    header: Option<H>,
    fds: Vec<OwnedFd>,
    too_many_fds: bool,
}

impl<H> Default for MessageAssembler<H> {
    fn default() -> Self {
        Self {
            bytes: Vec::new(),
            header: None,
            fds: Vec::new(),
            too_many_fds: false,
        }
    }
}

impl<H: Framed> MessageAssembler<H> {
    /// How many bytes to read next, at most: never 0, never past the end of the message in hand.
    pub fn bytes_wanted(&self) -> usize {
        let end = self
            .header
            .map_or(H::BYTES, |header| header.message_bytes());
        end.saturating_sub(self.bytes.len()).max(1)
    }

    /// Takes bytes, at most [`bytes_wanted`](Self::bytes_wanted) of them, and what came with them.
    /// The message, if that was its end.
    ///
    /// # Errors
    /// The stream has to be closed.
    pub fn feed(
        &mut self,
        bytes: &[u8],
        fds: impl IntoIterator<Item = OwnedFd>,
        truncated: bool,
    ) -> Result<Option<Message<H>>, H::Error> {
        self.bytes.extend(bytes);
        self.too_many_fds |= truncated;
        for fd in fds {
            if self.fds.len() < MAX_FDS {
                self.fds.push(fd);
            } else {
                self.too_many_fds = true;
            }
        }
        if self.header.is_none()
            && let Some(header) = self.bytes.get(..H::BYTES)
        {
            self.header = Some(H::decode_from(header)?);
        }
        let Some(header) = self.header else {
            return Ok(None);
        };
        if self.bytes.len() < header.message_bytes() {
            return Ok(None);
        }
        self.header = None;
        let mut body = std::mem::take(&mut self.bytes);
        body.drain(..H::BYTES.min(body.len()));
        Ok(Some(Message {
            header,
            body,
            fds: std::mem::take(&mut self.fds),
            too_many_fds: std::mem::take(&mut self.too_many_fds),
        }))
    }
}

impl Inbox {
    /// The part of a message that has come: its bytes, its descriptors, and whether there were too
    /// many of these.
    pub(crate) fn part(&self) -> (&[u8], &[OwnedFd], bool) {
        (&self.bytes, &self.fds, self.too_many_fds)
    }

    /// Goes on with a part that another has read. None: it is no part of a message, but a whole
    /// one, or none.
    pub(crate) fn with_part(bytes: &[u8], fds: Vec<OwnedFd>, too_many_fds: bool) -> Option<Self> {
        let mut inbox = Self::default();
        if bytes.is_empty() && (!fds.is_empty() || too_many_fds) {
            return None;
        }
        let whole = inbox.feed(bytes, fds, too_many_fds).ok()?;
        whole.is_none().then_some(inbox)
    }
}
