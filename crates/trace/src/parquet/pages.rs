//! Reads the pages of a column. The decoder never sees a page header: it would skip lists of the
//! size that they claim, and index pages without limit. This module reads the header by the strict
//! walk and checks the resources that the page may claim.

use std::fs::File;
use std::sync::Arc;

use parquet::basic::{Encoding, Type as Physical};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::reader::ChunkReader;

use super::footer::STATISTICS;
use super::thrift::Kind::{Bool, I32, Struct};
use super::thrift::{Fields, Kind, Reader};

/// Numbers of bytes to look for a header in. Most headers have less than 100 bytes; one with
/// statistics can hold two long texts.
const HEADER_BYTES: [u64; 2] = [4 << 10, 64 << 10];
/// Maximum number of values of a dictionary.
const MAX_DICTIONARY: u32 = 1 << 20;

/// The pages of a column chunk, in encodings without counts of their own, with no more values than
/// the footer states. A page header may claim 2^31 values in a few bytes.
pub(super) struct Pages {
    file: Arc<File>,
    /// Range of the file that has not been read.
    offset: u64,
    end: u64,
    /// Number of values that have not been read.
    values: u64,
    /// Minimum number of bytes of a dictionary value.
    value_bytes: u64,
    /// A dictionary is the first page.
    first: bool,
    /// The next page, if the decoder has asked for its kind.
    peeked: Option<Page>,
}

impl Pages {
    /// Returns the pages of a chunk, which must lie in the file.
    pub(super) fn new(file: Arc<File>, chunk: &ColumnChunkMetaData) -> Self {
        let (offset, bytes) = chunk.byte_range();
        Self {
            file,
            offset,
            end: offset.saturating_add(bytes),
            values: u64::try_from(chunk.num_values()).unwrap_or(0),
            value_bytes: match chunk.column_type() {
                Physical::INT64 => 8,
                // Size of a number, or of the length of a text.
                _ => 4,
            },
            first: true,
            peeked: None,
        }
    }

    fn read(&mut self) -> Result<Option<Page>, ParquetError> {
        let left = self.end - self.offset;
        if left == 0 {
            return Ok(None);
        }
        for most in HEADER_BYTES {
            let bytes = self.file.get_bytes(self.offset, left.min(most) as usize)?;
            let Some(Header {
                mut page,
                header,
                body,
            }) = Header::parse(&bytes)
            else {
                if left > most {
                    continue;
                }
                break;
            };
            let (start, end) = (header, header.saturating_add(body));
            if end as u64 > left {
                return refused("a page that exceeds its column".to_owned());
            }
            self.check(&page, body)?;
            let (Page::DataPage { buf, .. }
            | Page::DataPageV2 { buf, .. }
            | Page::DictionaryPage { buf, .. }) = &mut page;
            *buf = match end <= bytes.len() {
                true => bytes.slice(start..end),
                false => self.file.get_bytes(self.offset + start as u64, body)?,
            };
            self.offset += end as u64;
            self.first = false;
            return Ok(Some(page));
        }
        refused("a damaged page header, or one with unknown fields".to_owned())
    }

    /// Checks a page of `bytes` bytes before its decoder allocates the claimed size.
    /// `DELTA_LENGTH_BYTE_ARRAY` and `DELTA_BYTE_ARRAY` contain a count of lengths that the decoder
    /// allocates for. The decoder of `DELTA_BINARY_PACKED` allocates nothing.
    fn check(&mut self, page: &Page, bytes: usize) -> Result<(), ParquetError> {
        use Encoding::{DELTA_BINARY_PACKED, PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY};
        let values = page.num_values();
        let (encoding, bytes) = (page.encoding(), bytes as u64);
        if page.is_dictionary_page() {
            if !matches!(encoding, PLAIN | PLAIN_DICTIONARY) {
                return refused("a dictionary in an encoding that is not read".to_owned());
            }
            let least = u64::from(values).saturating_mul(self.value_bytes);
            if !self.first || values > MAX_DICTIONARY || least > bytes {
                return refused(format!("a dictionary of {values} values in {bytes} bytes"));
            }
            return Ok(());
        }
        if !matches!(
            encoding,
            PLAIN | RLE | RLE_DICTIONARY | PLAIN_DICTIONARY | DELTA_BINARY_PACKED
        ) {
            return refused(format!("unsupported page encoding {encoding}"));
        }
        let levels_fit = match page {
            Page::DataPage {
                def_level_encoding,
                rep_level_encoding,
                ..
            } => *def_level_encoding == RLE && *rep_level_encoding == RLE,
            Page::DataPageV2 {
                def_levels_byte_len,
                rep_levels_byte_len,
                ..
            } => u64::from(*def_levels_byte_len) + u64::from(*rep_levels_byte_len) <= bytes,
            Page::DictionaryPage { .. } => true,
        };
        if !levels_fit {
            return refused("levels that are not read".to_owned());
        }
        let Some(left) = self.values.checked_sub(u64::from(values)) else {
            let left = self.values;
            return refused(format!("a page of {values} values where {left} are left"));
        };
        self.values = left;
        Ok(())
    }
}

fn refused<T>(message: String) -> Result<T, ParquetError> {
    Err(ParquetError::General(message))
}

impl Iterator for Pages {
    type Item = Result<Page, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
        match self.peeked.take() {
            Some(page) => Ok(Some(page)),
            None => self.read(),
        }
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
        if self.peeked.is_none() {
            self.peeked = self.read()?;
        }
        Ok(self.peeked.as_ref().map(|page| PageMetadata {
            num_rows: match page {
                Page::DataPageV2 { num_rows, .. } => Some(*num_rows as usize),
                _ => None,
            },
            num_levels: page.is_data_page().then_some(page.num_values() as usize),
            is_dict: page.is_dictionary_page(),
        }))
    }

    fn skip_next_page(&mut self) -> Result<(), ParquetError> {
        self.get_next_page().map(drop)
    }
}

// `PageHeader` of `parquet.thrift`, without the header of an index page, which no writer uses.
static PAGE: &Fields = &[
    (1, I32),
    (2, I32),
    (3, I32),
    (4, I32),
    (5, Struct(DATA)),
    (7, Struct(DICTIONARY)),
    (8, Struct(DATA_V2)),
];

// `DataPageHeader` of `parquet.thrift`.
static DATA: &Fields = &[
    (1, I32),
    (2, I32),
    (3, I32),
    (4, I32),
    (5, Struct(STATISTICS)),
];

// `DictionaryPageHeader` of `parquet.thrift`.
static DICTIONARY: &Fields = &[(1, I32), (2, I32), (3, Bool)];

// `DataPageHeaderV2` of `parquet.thrift`.
static DATA_V2: &Fields = &[
    (1, I32),
    (2, I32),
    (3, I32),
    (4, I32),
    (5, I32),
    (6, I32),
    (7, Bool),
    (8, Struct(STATISTICS)),
];

/// A page header.
struct Header {
    /// The page, without its bytes.
    page: Page,
    /// Sizes of the header and of the page in bytes.
    header: usize,
    body: usize,
}

impl Header {
    /// Parses the header at the start of `bytes`; `None` if it is invalid or longer.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let mut inner = None;
        let outer = numbers(&mut reader, PAGE, &mut |reader, id, kind| {
            let Kind::Struct(fields) = kind else {
                return None;
            };
            let values = numbers(reader, fields, &mut |reader, _, kind| reader.value(kind))?;
            // A page has one header of its own.
            inner.replace((id, values)).is_none().then_some(())
        })?;
        let (buf, statistics) = (Vec::new().into(), None);
        let [_, kind, _, size, ..] = outer;
        let page = match (kind?, inner?) {
            (0, (5, [_, values, encoding, definition, repetition, ..])) => Page::DataPage {
                buf,
                num_values: count(values)?,
                encoding: encoding_of(encoding?)?,
                def_level_encoding: encoding_of(definition?)?,
                rep_level_encoding: encoding_of(repetition?)?,
                statistics,
            },
            (2, (7, [_, values, encoding, ..])) => Page::DictionaryPage {
                buf,
                num_values: count(values)?,
                encoding: encoding_of(encoding?)?,
                is_sorted: false,
            },
            (3, (8, [_, values, nulls, rows, encoding, definition, repetition])) => {
                Page::DataPageV2 {
                    buf,
                    num_values: count(values)?,
                    encoding: encoding_of(encoding?)?,
                    num_nulls: count(nulls)?,
                    num_rows: count(rows)?,
                    def_levels_byte_len: count(definition)?,
                    rep_levels_byte_len: count(repetition)?,
                    is_compressed: false,
                    statistics,
                }
            }
            _ => return None,
        };
        Some(Self {
            page,
            header: bytes.len() - reader.left(),
            body: usize::try_from(size?).ok()?,
        })
    }
}

/// Reads a struct and returns its numbers by their ids. `other` reads the other fields.
fn numbers(
    reader: &mut Reader<'_>,
    known: &Fields,
    other: &mut dyn FnMut(&mut Reader<'_>, i16, &Kind) -> Option<()>,
) -> Option<[Option<i32>; 7]> {
    let mut numbers = [None; 7];
    reader.fields(known, &mut |reader, id, kind| {
        match (kind, numbers.get_mut(usize::try_from(id).ok()?)) {
            (Kind::I32, Some(number)) => *number = Some(reader.number()?),
            _ => other(reader, id, kind)?,
        }
        Some(())
    })?;
    Some(numbers)
}

fn count(number: Option<i32>) -> Option<u32> {
    u32::try_from(number?).ok()
}

/// Returns the encoding with this number; `None` if Parquet defines none.
fn encoding_of(number: i32) -> Option<Encoding> {
    Some(match number {
        0 => Encoding::PLAIN,
        2 => Encoding::PLAIN_DICTIONARY,
        3 => Encoding::RLE,
        #[allow(deprecated)]
        4 => Encoding::BIT_PACKED,
        5 => Encoding::DELTA_BINARY_PACKED,
        6 => Encoding::DELTA_LENGTH_BYTE_ARRAY,
        7 => Encoding::DELTA_BYTE_ARRAY,
        8 => Encoding::RLE_DICTIONARY,
        9 => Encoding::BYTE_STREAM_SPLIT,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// Pages of a column of numbers of 32 bits, which states 100 values.
    fn pages(bytes: &[u8]) -> Pages {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Pages {
            file: Arc::new(file),
            offset: 0,
            end: bytes.len() as u64,
            values: 100,
            value_bytes: 4,
            first: true,
            peeked: None,
        }
    }

    #[test]
    fn pages_with_oversized_claims_are_rejected() {
        use Encoding::*;
        let data = |encoding, def_level_encoding| Page::DataPage {
            buf: Vec::new().into(),
            num_values: 1,
            encoding,
            def_level_encoding,
            rep_level_encoding: RLE,
            statistics: None,
        };
        let second = |def_levels_byte_len, rep_levels_byte_len| Page::DataPageV2 {
            buf: Vec::new().into(),
            num_values: 1,
            encoding: PLAIN,
            num_nulls: 0,
            num_rows: 1,
            def_levels_byte_len,
            rep_levels_byte_len,
            is_compressed: false,
            statistics: None,
        };
        let dictionary = |num_values, encoding| Page::DictionaryPage {
            buf: Vec::new().into(),
            num_values,
            encoding,
            is_sorted: false,
        };
        let cases = [
            (data(PLAIN, RLE), 64, true),
            (data(RLE_DICTIONARY, RLE), 64, true),
            (data(DELTA_BINARY_PACKED, RLE), 64, true),
            (data(DELTA_LENGTH_BYTE_ARRAY, RLE), 64, false),
            (data(DELTA_BYTE_ARRAY, RLE), 64, false),
            (data(BYTE_STREAM_SPLIT, RLE), 64, false),
            #[allow(deprecated)]
            (data(PLAIN, BIT_PACKED), 64, false),
            (second(60, 4), 64, true),
            (second(61, 4), 64, false),
            (second(u32::MAX, 1), 64, false),
            (dictionary(16, PLAIN), 64, true),
            (dictionary(17, PLAIN), 64, false),
            (dictionary(1, DELTA_BYTE_ARRAY), 64, false),
            (dictionary(MAX_DICTIONARY, PLAIN), 8 << 20, true),
            (dictionary(MAX_DICTIONARY + 1, PLAIN), 8 << 20, false),
        ];
        for (page, bytes, sound) in cases {
            assert_eq!(pages(&[]).check(&page, bytes).is_ok(), sound, "{page:?}");
        }
    }

    /// A data page of `values` values and a byte, of which the header states the encodings.
    fn data_page(values: u8) -> Vec<u8> {
        let header = [0x15, 0, 0x15, 2, 0x15, 2, 0x2c, 0x15, values << 1];
        let encodings = [0x15, 0, 0x15, 6, 0x15, 6, 0, 0];
        [&header[..], &encodings, &[0xaa]].concat()
    }

    #[test]
    fn pages_claim_no_more_values_than_the_footer() {
        let mut pages = pages(&[data_page(50), data_page(50), data_page(1)].concat());
        let next = pages.peek_next_page().unwrap().unwrap();
        assert_eq!((next.num_levels, next.num_rows), (Some(50), None));
        for _ in 0..2 {
            let page = pages.get_next_page().unwrap().unwrap();
            assert_eq!(page.buffer().as_ref(), [0xaa]);
        }
        assert!(pages.get_next_page().is_err());
    }

    #[test]
    fn a_column_ends_after_its_last_page() {
        let mut pages = pages(&data_page(1));
        assert!(!pages.at_record_boundary().unwrap());
        assert!(pages.get_next_page().unwrap().is_some());
        assert!(pages.at_record_boundary().unwrap());
        assert!(pages.get_next_page().unwrap().is_none());
    }

    #[test]
    fn a_dictionary_is_the_first_page() {
        let header = [0x15, 4, 0x15, 8, 0x15, 8, 0x4c];
        let dictionary = [&header[..], &[0x15, 2, 0x15, 0, 0x12, 0, 0], &[0; 4]].concat();
        let mut sound = pages(&[&dictionary[..], &data_page(1)].concat());
        assert!(sound.get_next_page().unwrap().unwrap().is_dictionary_page());
        assert!(sound.get_next_page().unwrap().unwrap().is_data_page());
        let mut late = pages(&[data_page(1), dictionary].concat());
        assert!(late.get_next_page().is_ok());
        assert!(late.get_next_page().is_err());
    }

    #[test]
    fn a_long_header_is_read_up_to_a_limit() {
        // Statistics of a data page whose field 1 is a text.
        let page = |text: usize| {
            let sound = data_page(1);
            let (start, end) = sound.split_at(sound.len() - 3);
            let length = [
                text as u8 | 0x80,
                (text >> 7) as u8 | 0x80,
                (text >> 14) as u8,
            ];
            let texts = [&[0x1c, 0x18][..], &length, &vec![b'm'; text], &[0]].concat();
            [start, &texts, end].concat()
        };
        for (text, sound) in [(100, true), (5000, true), (65000, true), (65536, false)] {
            let read = pages(&page(text)).get_next_page();
            assert_eq!(read.is_ok(), sound, "{text}");
        }
    }

    #[test]
    fn a_page_header_has_only_known_fields() {
        let sound = data_page(1);
        let (start, end) = sound.split_at(sound.len() - 2);
        let with = |field: &[u8]| [start, field, end].concat();
        let cases: [(&str, Vec<u8>, bool); 9] = [
            ("sound", sound.clone(), true),
            (
                "a list of 2^31 doubles",
                with(&[0x49, 0xf7, 255, 255, 255, 255, 7]),
                false,
            ),
            (
                "a list of 2^31 booleans",
                with(&[0x49, 0xf1, 255, 255, 255, 255, 7]),
                false,
            ),
            (
                "two headers of pages",
                with(&[0x2c, 0x15, 2, 0x15, 0, 0]),
                false,
            ),
            (
                "an index page",
                vec![0x15, 2, 0x15, 0, 0x15, 0, 0x3c, 0, 0],
                false,
            ),
            (
                "an index page without a header",
                vec![0x15, 2, 0x15, 0, 0x15, 0, 0],
                false,
            ),
            (
                "no header of its own",
                vec![0x15, 0, 0x15, 0, 0x15, 0, 0],
                false,
            ),
            (
                "a size below 0",
                [&[0x15, 0, 0x15, 2, 0x15, 1][..], &sound[6..]].concat(),
                false,
            ),
            (
                "bytes that the column lacks",
                sound[..sound.len() - 1].to_vec(),
                false,
            ),
        ];
        for (name, bytes, accepted) in cases {
            assert_eq!(pages(&bytes).get_next_page().is_ok(), accepted, "{name}");
        }
    }
}
