//! Encoding of values as bytes and descriptors: little-endian, without padding. A count precedes
//! the items that it counts. A reader checks every count against a bound and against the bytes
//! that are left before it allocates memory.

use std::os::fd::OwnedFd;

use super::{SaveState, StateError};

/// Most bytes of a stream.
pub const MAX_STREAM_BYTES: usize = 64 << 20;

/// A stream under construction.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(crate) fn flag(&mut self, value: bool) {
        self.u8(value.into());
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes.extend(value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes.extend(value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes.extend(value.to_le_bytes());
    }

    pub(crate) fn blob(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.count(bytes.len());
        self.bytes.extend(bytes);
    }

    /// Writes a count. A count beyond `u32` becomes `u32::MAX`, which every reader rejects.
    pub(crate) fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Appends a descriptor. Descriptors have the order of the bytes that announce them.
    pub(crate) fn fd(&mut self, fd: OwnedFd) {
        self.fds.push(fd);
    }

    /// Writes a count and the items.
    pub(crate) fn list<T: SaveState>(&mut self, items: Vec<T>) {
        self.count(items.len());
        items.into_iter().for_each(|item| item.encode(self));
    }
}

/// The unread rest of a stream.
pub(crate) struct Reader<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) fds: std::vec::IntoIter<OwnedFd>,
}

impl<'a> Reader<'a> {
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], StateError> {
        let (taken, rest) = self
            .bytes
            .split_first_chunk()
            .ok_or(StateError::Truncated)?;
        self.bytes = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, StateError> {
        self.array().map(|[value]| value)
    }

    pub(crate) fn flag(&mut self) -> Result<bool, StateError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(StateError::BadValue {
                what: "flag",
                value: value.into(),
            }),
        }
    }

    pub(crate) fn u16(&mut self) -> Result<u16, StateError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, StateError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, StateError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a count of at most `most` items.
    pub(crate) fn count(&mut self, what: &'static str, most: usize) -> Result<usize, StateError> {
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
    pub(crate) fn blob(&mut self, what: &'static str, most: usize) -> Result<Vec<u8>, StateError> {
        let count = self.count(what, most)?;
        let (taken, rest) = self
            .bytes
            .split_at_checked(count)
            .ok_or(StateError::Truncated)?;
        self.bytes = rest;
        Ok(taken.to_vec())
    }

    pub(crate) fn fd(&mut self) -> Result<OwnedFd, StateError> {
        self.fds.next().ok_or(StateError::Descriptors)
    }

    /// Reads a list of at most `most` items.
    pub(crate) fn list<T: SaveState>(
        &mut self,
        what: &'static str,
        most: usize,
    ) -> Result<Vec<T>, StateError> {
        let count = self.count(what, most)?;
        (0..count).map(|_| T::decode(self)).collect()
    }
}
