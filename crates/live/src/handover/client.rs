//! A client's session and the guest memory that it shares.

use std::os::fd::OwnedFd;

use ringfence_types::{Iova, IovaRange};

use super::StateError;
use super::bytes::{Reader, Writer};
use crate::memory::MAX_RANGES;
use crate::wire::{MAX_FDS, MAX_MESSAGE_BYTES};

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

/// A range of guest memory.
#[derive(Debug)]
pub struct RangeState {
    /// Range in the device's view: guest-physical if QEMU emulates no IOMMU.
    pub range: IovaRange,
    /// Offset in the file.
    pub offset: u64,
    /// Backing file; `None` if the range is inaccessible.
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
