//! Reads of fields that cannot leave their structure, and the iterator over structures.

use core::iter::FusedIterator;

use crate::error::{FirmwareError, FirmwareErrorKind};

/// Bytes of a table, which know their offset in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bytes<'a> {
    data: &'a [u8],
    /// Offset of the first byte in the table, for errors and references.
    offset: usize,
}

impl<'a> Bytes<'a> {
    pub(crate) const EMPTY: Self = Self::table(&[]);

    /// The bytes of a whole table.
    pub(crate) const fn table(data: &'a [u8]) -> Self {
        Self { data, offset: 0 }
    }

    pub(crate) fn data(&self) -> &'a [u8] {
        self.data
    }

    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Returns the offset in the table.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Returns an error at the byte `at` of this part.
    pub(crate) fn error(&self, at: usize, kind: FirmwareErrorKind) -> FirmwareError {
        kind.at(self.offset.saturating_add(at))
    }

    /// Returns `bytes` bytes from `at`.
    pub(crate) fn part(&self, at: usize, bytes: usize) -> Result<Self, FirmwareError> {
        let end = at.checked_add(bytes);
        let data = end.and_then(|end| self.data.get(at..end));
        Ok(Self {
            data: data.ok_or_else(|| self.error(at, FirmwareErrorKind::Truncated))?,
            offset: self.offset.saturating_add(at),
        })
    }

    /// Returns all bytes from `at` on.
    pub(crate) fn from(&self, at: usize) -> Result<Self, FirmwareError> {
        match self.len().checked_sub(at) {
            Some(bytes) => self.part(at, bytes),
            None => Err(self.error(at, FirmwareErrorKind::Truncated)),
        }
    }

    pub(crate) fn array<const N: usize>(&self, at: usize) -> Result<[u8; N], FirmwareError> {
        let part = self.part(at, N)?;
        <[u8; N]>::try_from(part.data).map_err(|_| self.error(at, FirmwareErrorKind::Truncated))
    }

    pub(crate) fn u8(&self, at: usize) -> Result<u8, FirmwareError> {
        self.array(at).map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&self, at: usize) -> Result<u16, FirmwareError> {
        self.array(at).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&self, at: usize) -> Result<u32, FirmwareError> {
        self.array(at).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&self, at: usize) -> Result<u64, FirmwareError> {
        self.array(at).map(u64::from_le_bytes)
    }

    /// Reads a cell of a device tree, which is big-endian.
    pub(crate) fn cell(&self, at: usize) -> Result<u32, FirmwareError> {
        self.array(at).map(u32::from_be_bytes)
    }

    /// Fails unless there are `bytes` bytes, which the type of the structure requires.
    pub(crate) fn at_least(&self, bytes: usize) -> Result<(), FirmwareError> {
        if self.len() < bytes {
            return Err(self.error(0, FirmwareErrorKind::StructureLength));
        }
        Ok(())
    }

    /// Returns the text from `at` up to its zero byte, which is within `longest` bytes.
    pub(crate) fn text(&self, at: usize, longest: usize) -> Result<&'a [u8], FirmwareError> {
        let rest = self.from(at)?;
        let searched = rest.data.get(..longest).unwrap_or(rest.data);
        let end = searched.iter().position(|byte| *byte == 0);
        end.and_then(|end| searched.get(..end))
            .ok_or_else(|| rest.error(0, FirmwareErrorKind::Unterminated))
    }
}

/// Iterator over structures that follow each other. It ends after an error.
#[derive(Debug, Clone)]
pub(crate) struct Records<'a> {
    rest: Bytes<'a>,
    /// Bytes of the part that all structures have.
    header: usize,
    /// Reads the length of the first structure.
    length: fn(&Bytes<'a>) -> Result<usize, FirmwareError>,
    /// Number of structures; `None` up to the end of the bytes.
    count: Option<u32>,
}

impl<'a> Records<'a> {
    pub(crate) fn new(
        rest: Bytes<'a>,
        header: usize,
        length: fn(&Bytes<'a>) -> Result<usize, FirmwareError>,
    ) -> Self {
        Self {
            rest,
            header,
            length,
            count: None,
        }
    }

    /// Ends after `count` structures, which must be there.
    pub(crate) fn limited_to(self, count: u32) -> Self {
        Self {
            count: Some(count),
            ..self
        }
    }

    fn first(&self) -> Result<Bytes<'a>, FirmwareError> {
        self.rest.part(0, self.header)?;
        let length = (self.length)(&self.rest)?;
        if length < self.header {
            return Err(self.rest.error(0, FirmwareErrorKind::StructureLength));
        }
        self.rest.part(0, length)
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Bytes<'a>, FirmwareError>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.count {
            Some(count) => *count = count.checked_sub(1)?,
            None if self.rest.is_empty() => return None,
            None => {}
        }
        let record = self.first();
        let rest = record.and_then(|record| self.rest.from(record.len()));
        match rest {
            Ok(rest) => self.rest = rest,
            Err(_) => {
                self.rest = Bytes::EMPTY;
                self.count = None;
            }
        }
        Some(record)
    }
}

impl FusedIterator for Records<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(data: &[u8], count: Option<u32>) -> ([usize; 4], Option<FirmwareError>) {
        let mut records = Records::new(Bytes::table(data), 2, |rest| rest.u8(1).map(usize::from));
        if let Some(count) = count {
            records = records.limited_to(count);
        }
        let mut found = [0; 4];
        let mut error = None;
        for (record, slot) in records.by_ref().zip(&mut found) {
            match record {
                Ok(record) => *slot = record.len(),
                Err(why) => error = Some(why),
            }
        }
        assert_eq!(records.next(), None);
        (found, error)
    }

    #[test]
    fn records_end_at_their_end() {
        assert_eq!(lengths(&[0, 2, 0, 3, 9], None), ([2, 3, 0, 0], None));
        assert_eq!(lengths(&[0, 2, 0, 3, 9], Some(1)), ([2, 0, 0, 0], None));
        assert_eq!(lengths(&[], None), ([0; 4], None));
    }

    #[test]
    fn a_bad_record_is_the_last() {
        let error = |offset, kind| Some(FirmwareError { offset, kind });
        let short = error(2, FirmwareErrorKind::StructureLength);
        assert_eq!(lengths(&[0, 2, 0, 0, 0, 2], None), ([2, 0, 0, 0], short));
        let truncated = error(2, FirmwareErrorKind::Truncated);
        assert_eq!(lengths(&[0, 2, 0, 3], None), ([2, 0, 0, 0], truncated));
        assert_eq!(lengths(&[0, 2, 0], None), ([2, 0, 0, 0], truncated));
        assert_eq!(lengths(&[0, 2], Some(2)), ([2, 0, 0, 0], truncated));
    }
}
