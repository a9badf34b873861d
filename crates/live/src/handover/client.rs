//! A client's session and the guest memory that it shares.

use std::os::fd::OwnedFd;

use ringfence_types::{Iova, IovaRange};
use ringfence_vfio_user::{MAX_FDS, MAX_MESSAGE_BYTES};

use crate::memory::{MAX_RANGES, RangeState};
use crate::saved_state::{Reader, SaveState, StateError, Writer, save_fields};

/// State of a client's session.
#[derive(Debug)]
pub struct SessionState {
    /// Socket of the connection.
    pub stream: OwnedFd,
    /// True if the version was negotiated.
    pub agreed: bool,
    /// Received part of a message.
    pub bytes: Vec<u8>,
    /// Descriptors received with that part.
    pub fds: Vec<OwnedFd>,
    /// True if the message has more descriptors than permitted.
    pub too_many_fds: bool,
    /// Ranges of guest memory.
    pub ranges: Vec<RangeState>,
}

save_fields! {
    SessionState {
        stream,
        agreed,
        bytes: blob("message length", MAX_MESSAGE_BYTES),
        fds: list("descriptor count of a message", MAX_FDS),
        too_many_fds,
        ranges: list("ranges", MAX_RANGES),
    }
}

impl SaveState for RangeState {
    fn encode(self, out: &mut Writer) {
        out.u64(self.range.start().get());
        out.u64(self.range.bytes());
        out.u64(self.offset);
        self.file.encode(out);
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let (start, bytes) = (input.u64()?, input.u64()?);
        let range = IovaRange::new(Iova::new(start), bytes);
        let range = range.ok_or(StateError::BadValue {
            what: "range length",
            value: bytes,
        })?;
        let (offset, file) = (input.u64()?, Option::decode(input)?);
        if file.is_none() && offset != 0 {
            return Err(StateError::BadValue {
                what: "offset of an inaccessible range",
                value: offset,
            });
        }
        Ok(Self {
            range,
            offset,
            file,
        })
    }
}
