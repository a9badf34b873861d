//! Streams of migration records: decoding rejects a stream unless all of it is valid.

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::{Direction, Iova};

use super::crc32c::crc32c;
use super::words::Reader;
use super::{Devid, Gpa, PAGE_BYTES, Record, direction};

/// First bytes of a stream. The last byte is the version.
pub const STREAM_MAGIC: [u8; 8] = *b"PVIOMMU\x01";

const COUNT_AT: usize = 8;
const CRC_BYTES: usize = 4;
/// Offsets in a record: its number of pages and the end of its range.
const PAGES_AT: usize = 8;
const END_AT: usize = 24;

/// Reason why a migration stream is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamErrorKind {
    /// The first bytes are not [`STREAM_MAGIC`].
    Magic,
    /// The checksum differs.
    Checksum {
        /// Checksum in the stream.
        stated: u32,
        /// Checksum of the received bytes.
        computed: u32,
    },
    /// The stream ends inside a record or before the stated number of records.
    TooShort,
    /// Bytes follow the last record.
    TooLong,
    /// The direction is reserved.
    Direction(u32),
    /// A record is empty, misaligned, wraps, or its stated end is wrong.
    Range,
    /// A record does not follow the previous one in order.
    Order,
}

/// Position and reason of an error in a migration stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamError {
    /// Number of the record, from 0. For trailing bytes, the stated number of records; 0 for an
    /// error of the header or the checksum.
    pub record: u64,
    /// Reason why the stream is invalid.
    pub kind: StreamErrorKind,
}

impl fmt::Display for StreamErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("not a migration stream of this version"),
            Self::Checksum { stated, computed } => {
                write!(f, "checksum {computed:#010x}, not {stated:#010x}")
            }
            Self::TooShort => f.write_str("the stream is too short"),
            Self::TooLong => f.write_str("the stream is too long"),
            Self::Direction(raw) => write!(f, "unknown direction {raw}"),
            Self::Range => f.write_str("the range is not whole pages"),
            Self::Order => f.write_str("the record is out of order"),
        }
    }
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "migration record {}: {}", self.record, self.kind)
    }
}

impl core::error::Error for StreamError {}

/// A migration stream whose checksum, layout and order are valid. Decoding has not checked its
/// devices and addresses.
#[derive(Debug, Clone, Copy)]
pub struct MigrationStream<'a> {
    records: &'a [u8],
    count: u64,
}

impl<'a> MigrationStream<'a> {
    /// Decodes a stream.
    ///
    /// # Errors
    /// Returns a [`StreamError`] if any part is invalid; the caller must not use the rest.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, StreamError> {
        let fail = |record, kind| StreamError { record, kind };
        if !bytes.starts_with(&STREAM_MAGIC) {
            return Err(fail(0, StreamErrorKind::Magic));
        }
        let short = fail(0, StreamErrorKind::TooShort);
        let (body, sum) = bytes.split_last_chunk::<CRC_BYTES>().ok_or(short)?;
        let mut reader = Reader(body.get(COUNT_AT..).ok_or(short)?);
        let count = reader.le64().ok_or(short)?;
        let (stated, computed) = (u32::from_le_bytes(*sum), crc32c(body));
        if stated != computed {
            return Err(fail(0, StreamErrorKind::Checksum { stated, computed }));
        }
        let stream = Self {
            records: reader.0,
            count,
        };
        let mut reached: Option<(Devid, Iova)> = None;
        for record in 0..count {
            // If `count` exceeds the records, decoding stops at the first missing record.
            let next = Record::take(&mut reader).map_err(|kind| fail(record, kind))?;
            if reached.is_some_and(|reached| (next.device, next.first) < reached) {
                return Err(fail(record, StreamErrorKind::Order));
            }
            reached = Some((next.device, next.end()));
        }
        if !reader.0.is_empty() {
            return Err(fail(count, StreamErrorKind::TooLong));
        }
        Ok(stream)
    }

    /// Number of records.
    pub const fn len(&self) -> u64 {
        self.count
    }

    /// Returns true if the stream has no records.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the records in order.
    pub fn records(&self) -> impl Iterator<Item = Record<'a>> + Clone + use<'a> {
        let mut reader = Reader(self.records);
        // `decode` has checked every record, so none fails before `count`.
        (0..self.count).map_while(move |_| Record::take(&mut reader).ok())
    }
}

/// Error: a page is not after the previous one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OutOfOrder {
    /// Device of the page.
    pub device: Devid,
    /// GIOVA of the page.
    pub giova: Iova,
}

impl fmt::Display for OutOfOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of device {} is out of order",
            self.giova, self.device
        )
    }
}

impl core::error::Error for OutOfOrder {}

/// Encodes a stream from single mappings in ascending order, and merges runs into records.
#[derive(Debug)]
pub struct StreamWriter {
    bytes: Vec<u8>,
    records: u64,
    run: Option<Run>,
}

/// The record at the end of the stream.
#[derive(Debug)]
struct Run {
    device: Devid,
    direction: Direction,
    end: Iova,
    pages: u32,
    /// Offset of the record in the stream.
    at: usize,
}

impl Default for StreamWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl StreamWriter {
    /// Creates a stream without records.
    pub fn new() -> Self {
        let mut bytes = STREAM_MAGIC.to_vec();
        bytes.extend([0; 8]);
        Self {
            bytes,
            records: 0,
            run: None,
        }
    }

    /// Appends a mapping.
    ///
    /// # Errors
    /// Fails if the mapping is not after the previous one, or if its page is the last of the
    /// address space. The stream is unchanged.
    pub fn page(
        &mut self,
        device: Devid,
        giova: Iova,
        gpa: Gpa,
        direction: Direction,
    ) -> Result<(), OutOfOrder> {
        let wrong = OutOfOrder { device, giova };
        let end = giova.checked_add(PAGE_BYTES).ok_or(wrong)?;
        match &mut self.run {
            Some(run) if (device, giova) < (run.device, run.end) => return Err(wrong),
            Some(run)
                if run.device == device
                    && run.direction == direction
                    && run.end == giova
                    && run.pages < u32::MAX =>
            {
                run.pages += 1;
                run.end = end;
            }
            run => {
                let at = self.bytes.len();
                let header = [
                    device.get(),
                    u64::from(direction::encode(direction)) << 32 | 1,
                    giova.get(),
                    end.get(),
                ];
                for word in header {
                    self.bytes.extend(word.to_le_bytes());
                }
                self.records += 1;
                *run = Some(Run {
                    device,
                    direction,
                    end,
                    pages: 1,
                    at,
                });
            }
        }
        self.bytes.extend(gpa.get().to_le_bytes());
        if let Some(run) = &self.run {
            put(&mut self.bytes, run.at + PAGES_AT, &run.pages.to_le_bytes());
            put(
                &mut self.bytes,
                run.at + END_AT,
                &run.end.get().to_le_bytes(),
            );
        }
        Ok(())
    }

    /// Returns the encoded stream.
    pub fn finish(mut self) -> Vec<u8> {
        put(&mut self.bytes, COUNT_AT, &self.records.to_le_bytes());
        let sum = crc32c(&self.bytes);
        self.bytes.extend(sum.to_le_bytes());
        self.bytes
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(slot) = bytes
        .get_mut(at..)
        .and_then(|rest| rest.get_mut(..value.len()))
    {
        slot.copy_from_slice(value);
    }
}
