//! vhost-user frames for IOTLB messages: a header of 12 bytes, then the payload.

use super::error::FrameError;
use super::message::Message;

/// `VHOST_USER_IOTLB_MSG`, a request of the front-end.
pub const FRONTEND_IOTLB: u32 = 22;
/// `VHOST_USER_BACKEND_IOTLB_MSG`, a request of the back-end.
const BACKEND_IOTLB: u32 = 1;

/// Length of an IOTLB message in bytes.
pub const IOTLB_BYTES: usize = 32;

const HEADER_BYTES: usize = 12;
/// Length of a reply in bytes: header and status.
pub(super) const REPLY_BYTES: usize = HEADER_BYTES + 8;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Header {
    /// The request, or the request that this frame replies to.
    pub request: u32,
    /// True if the frame is a reply.
    pub reply: bool,
    /// True if the sender requests a reply.
    pub need_reply: bool,
    /// Payload length in bytes, as claimed by the peer. The receiver must check it against the
    /// request.
    pub bytes: u32,
}

impl Header {
    /// Length of a header in bytes.
    pub const BYTES: usize = HEADER_BYTES;

    /// Decodes a header.
    ///
    /// # Errors
    /// [`FrameError::Version`] for another protocol version.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let &[a, b, c, d, e, f, g, h, i, j, k, l] = bytes;
        let [request, flags, bytes] =
            [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_ne_bytes);
        if flags & VERSION_MASK != VERSION {
            return Err(FrameError::Version(flags & VERSION_MASK));
        }
        Ok(Self {
            request,
            reply: flags & REPLY != 0,
            need_reply: flags & NEED_REPLY != 0,
            bytes,
        })
    }

    /// Encodes the header.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let set = |flag, on: bool| if on { flag } else { 0 };
        let flags = VERSION | set(REPLY, self.reply) | set(NEED_REPLY, self.need_reply);
        let mut bytes = [0; HEADER_BYTES];
        join(
            &mut bytes,
            [self.request, flags, self.bytes]
                .map(u32::to_ne_bytes)
                .iter()
                .flatten(),
        );
        bytes
    }
}

/// Encodes a request of the back-end that requests a reply.
pub fn request(message: &Message) -> [u8; HEADER_BYTES + IOTLB_BYTES] {
    let header = Header {
        request: BACKEND_IOTLB,
        reply: false,
        need_reply: true,
        bytes: IOTLB_BYTES as u32,
    };
    let mut bytes = [0; HEADER_BYTES + IOTLB_BYTES];
    join(&mut bytes, header.encode().iter().chain(&message.encode()));
    bytes
}

/// Encodes the reply to a request of the front-end; `done` is true on success.
pub fn reply(request: u32, done: bool) -> [u8; REPLY_BYTES] {
    let header = Header {
        request,
        reply: true,
        need_reply: false,
        bytes: 8,
    };
    let mut bytes = [0; REPLY_BYTES];
    let status = u64::from(!done).to_ne_bytes();
    join(&mut bytes, header.encode().iter().chain(&status));
    bytes
}

/// Decodes the front-end's reply to a [`request`]. Returns true on success.
///
/// # Errors
/// [`FrameError`] if the frame is not such a reply.
pub fn reply_status(bytes: &[u8; REPLY_BYTES]) -> Result<bool, FrameError> {
    let (header, status) = bytes.split_first_chunk().ok_or(FrameError::NoReply)?;
    let header = Header::decode(header)?;
    if !header.reply || header.request != BACKEND_IOTLB {
        return Err(FrameError::NoReply);
    }
    if header.bytes != 8 {
        return Err(FrameError::Length(header.bytes));
    }
    Ok(status.iter().all(|byte| *byte == 0))
}

fn join<'a>(to: &mut [u8], from: impl Iterator<Item = &'a u8>) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
}
