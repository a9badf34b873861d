//! Frames of the vhost-user protocol, as far as IOTLB messages need them: a header of 12 bytes,
//! then the payload.

use super::error::FrameError;
use super::message::Message;

/// `VHOST_USER_IOTLB_MSG`: a request of the front-end.
pub const FRONTEND_IOTLB: u32 = 22;
/// `VHOST_USER_BACKEND_IOTLB_MSG`: a request of the back-end.
const BACKEND_IOTLB: u32 = 1;

/// Bytes of an IOTLB message.
pub const IOTLB_BYTES: usize = 32;

const HEADER_BYTES: usize = 12;
/// Bytes of a reply: the header, and a number.
pub(super) const REPLY_BYTES: usize = HEADER_BYTES + 8;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// What stands before every payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Header {
    /// Which request it is, or is replied to.
    pub request: u32,
    /// Whether it is a reply.
    pub reply: bool,
    /// Whether it asks for one.
    pub need_reply: bool,
    /// Bytes of the payload, as the peer says: to be checked against what the request has.
    pub bytes: u32,
}

impl Header {
    /// Bytes of a header.
    pub const BYTES: usize = HEADER_BYTES;

    /// Reads a header.
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

    /// The bytes of the header.
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

/// A request of the back-end's, which asks for a reply.
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

/// The reply to a request of the front-end's that asks for one: whether it was done.
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

/// What the front-end replies to a [`request`]: whether it has done it.
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
