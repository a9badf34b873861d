//! State of a file that records the requests of an IOMMU driver, and its encoding in the stream.

use std::os::fd::OwnedFd;

use super::StateError;
use super::bytes::{Reader, Writer};
use crate::iommu::PENDING_BYTES;

/// A record that another process continues.
#[derive(Debug)]
pub struct RecordState {
    /// The record file. Its duplicated descriptors share the file offset.
    pub file: OwnedFd,
    /// True if every request so far is in the file or pending. Otherwise no further request is
    /// recorded.
    pub whole: bool,
    /// Lines that are not written yet.
    pub pending: Vec<u8>,
    /// Number of requests that are not recorded; 0 if `whole` is set.
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
