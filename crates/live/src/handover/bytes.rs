//! Encoding of values as bytes and descriptors: little-endian, without padding. A count precedes
//! the items that it counts.

use std::os::fd::OwnedFd;

use super::StateError;

/// A stream under construction.
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

impl Writer {
    pub(super) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(super) fn flag(&mut self, value: bool) {
        self.u8(value.into());
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.bytes.extend(value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.bytes.extend(value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.bytes.extend(value.to_le_bytes());
    }

    pub(super) fn blob(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.bytes.extend(bytes);
    }

    /// Writes a count. A count beyond `u32` becomes `u32::MAX`, which every reader rejects.
    pub(super) fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Appends a descriptor. Descriptors have the order of the bytes that announce them.
    pub(super) fn fd(&mut self, fd: OwnedFd) {
        self.fds.push(fd);
    }

    pub(super) fn maybe_fd(&mut self, fd: Option<OwnedFd>) {
        self.flag(fd.is_some());
        self.fds.extend(fd);
    }
}

/// The unread rest of a stream.
pub(super) struct Reader<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) fds: std::vec::IntoIter<OwnedFd>,
}

impl Reader<'_> {
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], StateError> {
        let (taken, rest) = self
            .bytes
            .split_first_chunk()
            .ok_or(StateError::Truncated)?;
        self.bytes = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self) -> Result<u8, StateError> {
        self.array().map(|[value]| value)
    }

    pub(super) fn flag(&mut self) -> Result<bool, StateError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(StateError::BadValue {
                what: "flag",
                value: value.into(),
            }),
        }
    }

    pub(super) fn u16(&mut self) -> Result<u16, StateError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, StateError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, StateError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a count of at most `most` items.
    pub(super) fn count(&mut self, what: &'static str, most: usize) -> Result<usize, StateError> {
        let count = self.u32()?;
        usize::try_from(count)
            .ok()
            .filter(|count| *count <= most)
            .ok_or(StateError::BadValue {
                what,
                value: count.into(),
            })
    }

    /// Reads a byte string. Checks that the bytes are present before it allocates memory for them.
    pub(super) fn blob(&mut self, what: &'static str, most: usize) -> Result<Vec<u8>, StateError> {
        let count = self.count(what, most)?;
        let (taken, rest) = self
            .bytes
            .split_at_checked(count)
            .ok_or(StateError::Truncated)?;
        self.bytes = rest;
        Ok(taken.to_vec())
    }

    pub(super) fn fd(&mut self) -> Result<OwnedFd, StateError> {
        self.fds.next().ok_or(StateError::Descriptors)
    }

    pub(super) fn maybe_fd(&mut self) -> Result<Option<OwnedFd>, StateError> {
        if self.flag()? {
            self.fd().map(Some)
        } else {
            Ok(None)
        }
    }
}
