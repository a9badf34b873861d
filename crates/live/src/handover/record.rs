//! What an IOMMU's driver asks for, written down by one process after the other: values and their
//! place in the stream.

use std::os::fd::OwnedFd;

use super::StateError;
use super::bytes::{Reader, Writer};
use crate::iommu::PENDING_BYTES;

/// A record that goes on.
#[derive(Debug)]
pub struct RecordState {
    /// The file. Where the next line goes is what its descriptors share.
    pub file: OwnedFd,
    /// All requests up to now are in it, or pending. Otherwise nothing more is written.
    pub whole: bool,
    /// Lines that are yet to be written.
    pub pending: Vec<u8>,
    /// Requests that are not in it; 0 if it is whole.
    pub lost: u64,
}

impl RecordState {
    pub(super) fn encode(self, out: &mut Writer) {
        out.fd(self.file);
        out.flag(self.whole);
        out.blob(&self.pending);
        if !self.whole {
            out.u64(self.lost);
        }
    }

    pub(super) fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let (file, whole) = (input.fd()?, input.flag()?);
        Ok(Self {
            file,
            whole,
            pending: input.blob("bytes of a record", PENDING_BYTES)?,
            lost: if whole { 0 } else { input.u64()? },
        })
    }
}
