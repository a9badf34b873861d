//! A client's conversation, and the guest's memory that it shared.

use std::os::fd::OwnedFd;

use ringfence_types::{Iova, IovaRange};

use super::StateError;
use super::bytes::{Reader, Writer};
use crate::memory::MAX_RANGES;
use crate::wire::{MAX_FDS, MAX_MESSAGE_BYTES};

/// A client's conversation.
#[derive(Debug)]
pub struct SessionState {
    /// Its socket.
    pub stream: OwnedFd,
    /// The version was agreed on.
    pub agreed: bool,
    /// The part of a message that was read,
    pub bytes: Vec<u8>,
    /// the descriptors that came with it,
    pub fds: Vec<OwnedFd>,
    /// and whether there were more than a message may have.
    pub too_many_fds: bool,
    /// The guest's memory.
    pub ranges: Vec<RangeState>,
}

impl SessionState {
    pub(super) fn encode(self, out: &mut Writer) {
        out.fd(self.stream);
        out.flag(self.agreed);
        out.blob(&self.bytes);
        out.count(self.fds.len());
        self.fds.into_iter().for_each(|fd| out.fd(fd));
        out.flag(self.too_many_fds);
        out.count(self.ranges.len());
        for range in self.ranges {
            out.u64(range.range.start().get());
            out.u64(range.range.bytes());
            out.u64(range.offset);
            out.maybe_fd(range.file);
        }
    }

    pub(super) fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        Ok(Self {
            stream: input.fd()?,
            agreed: input.flag()?,
            bytes: input.blob("bytes of a message", MAX_MESSAGE_BYTES)?,
            fds: (0..input.count("descriptors of a message", MAX_FDS)?)
                .map(|_| input.fd())
                .collect::<Result<_, _>>()?,
            too_many_fds: input.flag()?,
            ranges: (0..input.count("ranges", MAX_RANGES)?)
                .map(|_| RangeState::decode(input))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// A range of the guest's memory.
#[derive(Debug)]
pub struct RangeState {
    /// Guest-physical.
    pub range: IovaRange,
    /// Offset in the file.
    pub offset: u64,
    /// The file; none: the range is out of reach.
    pub file: Option<OwnedFd>,
}

impl RangeState {
    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let (start, bytes) = (input.u64()?, input.u64()?);
        let range = IovaRange::new(Iova::new(start), bytes);
        let range = range.ok_or(StateError::BadValue {
            what: "bytes of a range",
            value: bytes,
        })?;
        let (offset, file) = (input.u64()?, input.maybe_fd()?);
        if file.is_none() && offset != 0 {
            return Err(StateError::BadValue {
                what: "offset of a range without a file",
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
