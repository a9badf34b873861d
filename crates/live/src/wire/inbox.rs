//! Messages out of a byte stream.
//!
//! Descriptors that travel with a message arrive with its first bytes. So the reader never asks for more than belongs to the
//! message in hand: then it is certain which message a descriptor came with.

use std::os::fd::OwnedFd;

use super::header::{FramingError, HEADER_BYTES, Header, MAX_FDS};

/// One message.
#[derive(Debug)]
pub struct Message {
    /// Its header.
    pub header: Header,
    /// What follows the header, of exactly the length that the header states.
    pub body: Vec<u8>,
    /// The descriptors that came with it, in their order.
    pub fds: Vec<OwnedFd>,
    /// More descriptors came than a message may carry; those beyond were closed.
    pub too_many_fds: bool,
}

/// A message that arrives piece by piece. Holds one message's bytes at most.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    header: Option<Header>,
    fds: Vec<OwnedFd>,
    too_many_fds: bool,
}

impl Inbox {
    /// How many bytes to read next, at most: never 0, never past the end of the message in hand.
    pub fn wants(&self) -> usize {
        let end = self.header.map_or(HEADER_BYTES, |header| header.size);
        end.saturating_sub(self.bytes.len()).max(1)
    }

    /// Takes bytes, at most [`Inbox::wants`] of them, and what came with them. The message, if that was its end.
    ///
    /// # Errors
    /// [`FramingError`]: the stream has to be closed.
    pub fn take(
        &mut self,
        bytes: &[u8],
        fds: impl IntoIterator<Item = OwnedFd>,
        truncated: bool,
    ) -> Result<Option<Message>, FramingError> {
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
            && let Some(header) = self.bytes.first_chunk::<HEADER_BYTES>()
        {
            self.header = Some(Header::decode(header)?);
        }
        let Some(header) = self.header else {
            return Ok(None);
        };
        if self.bytes.len() < header.size {
            return Ok(None);
        }
        self.header = None;
        let mut body = std::mem::take(&mut self.bytes);
        body.drain(..HEADER_BYTES.min(body.len()));
        Ok(Some(Message {
            header,
            body,
            fds: std::mem::take(&mut self.fds),
            too_many_fds: std::mem::take(&mut self.too_many_fds),
        }))
    }
}
