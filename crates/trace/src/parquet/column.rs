//! Reads one column of a row group and bounds the resources that it may claim.

use std::fs::File;
use std::sync::Arc;

use parquet::basic::{Compression, Encoding, Type as Physical};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::DataType;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::serialized_reader::SerializedPageReader;

use super::read::damaged;
use super::schema;
use crate::problem::ParquetProblem;

/// Maximum number of rows of a group.
const MAX_ROWS: i64 = 1 << 20;
/// Maximum number of values of a column in a group, absent values and empty lists included.
const MAX_VALUES: i64 = 4 << 20;
/// Maximum number of bytes of a column in a group.
const MAX_BYTES: i64 = 64 << 20;

/// Checks the footer's values for a row group before any allocation for it. Returns its number of
/// rows, and the sum of its rows and segments.
pub(super) fn check_group(
    group: &RowGroupMetaData,
    number: usize,
    file_bytes: u64,
) -> Result<(usize, u64), ParquetProblem> {
    let too_large = ParquetProblem::TooLarge { group: number };
    for (leaf, chunk) in schema::LEAVES.iter().zip(group.columns()) {
        if chunk.compression() != Compression::UNCOMPRESSED {
            return Err(ParquetProblem::Compressed {
                group: number,
                path: leaf.path,
            });
        }
        if chunk.num_values() > MAX_VALUES || chunk.compressed_size() > MAX_BYTES {
            return Err(too_large);
        }
        let start = chunk
            .dictionary_page_offset()
            .unwrap_or(chunk.data_page_offset());
        let inside = u64::try_from(start)
            .ok()
            .zip(u64::try_from(chunk.compressed_size()).ok())
            .and_then(|(start, bytes)| start.checked_add(bytes))
            .is_some_and(|end| end <= file_bytes);
        if !inside || chunk.num_values() < 0 || chunk.data_page_offset() < 0 {
            let message = format!("row group {number}: {} lies outside the file", leaf.path);
            return Err(ParquetProblem::Damaged { message });
        }
    }
    let rows = group.num_rows();
    if rows > MAX_ROWS {
        return Err(too_large);
    }
    let damaged = |message| Err(ParquetProblem::Damaged { message });
    let Ok(count) = usize::try_from(rows) else {
        return damaged(format!("row group {number} has {rows} rows"));
    };
    let mut segments = 0;
    for (leaf, chunk) in schema::LEAVES.iter().zip(group.columns()) {
        let values = chunk.num_values();
        match leaf.shape {
            schema::Shape::Segments => segments = values.max(segments),
            _ if values != rows => {
                let path = leaf.path;
                return damaged(format!(
                    "row group {number}: {path} has {values} of {rows} rows"
                ));
            }
            _ => {}
        }
    }
    Ok((count, (rows as u64).saturating_add(segments as u64)))
}

/// Returns the reader of column `index` of a file. [`check_group`] must have accepted the group.
pub(super) fn column<T: DataType>(
    file: &Arc<File>,
    group: &RowGroupMetaData,
    index: usize,
) -> Result<Column<T>, ParquetProblem> {
    let chunk = group.column(index);
    let rows = usize::try_from(group.num_rows()).unwrap_or(0);
    let pages = SerializedPageReader::new(Arc::clone(file), chunk, rows, None);
    let pages = Bounded {
        pages: Box::new(pages.map_err(damaged)?),
        left: u64::try_from(chunk.num_values()).unwrap_or(0),
        value_bytes: match chunk.column_type() {
            Physical::INT64 => 8,
            // Size of a number, or of the length of a text.
            _ => 4,
        },
    };
    Ok(Column {
        reader: ColumnReaderImpl::new(chunk.column_descr_ptr(), Box::new(pages)),
        values: Vec::new(),
        definition: Vec::new(),
        repetition: Vec::new(),
        value: 0,
        level: 0,
    })
}

/// Pages with no more values than the footer states, in encodings without counts of their own. A
/// page header may claim 2^31 values in a few bytes.
struct Bounded {
    pages: Box<dyn PageReader>,
    left: u64,
    /// Minimum number of bytes of a dictionary value.
    value_bytes: u64,
}

impl Bounded {
    /// Checks a page before its decoder allocates the claimed size. `DELTA_LENGTH_BYTE_ARRAY` and
    /// `DELTA_BYTE_ARRAY` contain a count of lengths that the decoder allocates for. The decoder of
    /// `DELTA_BINARY_PACKED` allocates nothing.
    fn check(&mut self, page: &Page) -> Result<(), ParquetError> {
        use Encoding::{DELTA_BINARY_PACKED, PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY};
        let values = u64::from(page.num_values());
        let refused = |what: &str| Err(ParquetError::General(what.to_owned()));
        if page.is_dictionary_page() {
            if !matches!(page.encoding(), PLAIN | PLAIN_DICTIONARY) {
                return refused("a dictionary in an encoding that is not read");
            }
            let bytes = page.buffer().len() as u64;
            if values.saturating_mul(self.value_bytes) > bytes {
                let message = format!("a dictionary of {values} values in {bytes} bytes");
                return Err(ParquetError::General(message));
            }
            return Ok(());
        }
        if !matches!(
            page.encoding(),
            PLAIN | RLE | RLE_DICTIONARY | PLAIN_DICTIONARY | DELTA_BINARY_PACKED
        ) {
            let message = format!("unsupported page encoding {}", page.encoding());
            return Err(ParquetError::General(message));
        }
        if let Page::DataPage {
            def_level_encoding,
            rep_level_encoding,
            ..
        } = page
            && (*def_level_encoding != RLE || *rep_level_encoding != RLE)
        {
            return refused("levels in an encoding that is not read");
        }
        let Some(left) = self.left.checked_sub(values) else {
            let message = format!("a page of {values} values where {} are left", self.left);
            return Err(ParquetError::General(message));
        };
        self.left = left;
        Ok(())
    }
}

impl Iterator for Bounded {
    type Item = Result<Page, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Bounded {
    fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
        let page = self.pages.get_next_page()?;
        if let Some(page) = &page {
            self.check(page)?;
        }
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<(), ParquetError> {
        self.pages.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool, ParquetError> {
        self.pages.at_record_boundary()
    }
}

/// A column. The caller reads a batch of rows and then takes them row by row.
pub(super) struct Column<T: DataType> {
    reader: ColumnReaderImpl<T>,
    values: Vec<T::T>,
    definition: Vec<i16>,
    repetition: Vec<i16>,
    /// Index of the next value in `values`.
    value: usize,
    /// Index of the next level in `definition` and `repetition`.
    level: usize,
}

impl<T: DataType> Column<T> {
    /// Reads exactly the next `rows` rows.
    pub(super) fn read(&mut self, rows: usize) -> Result<(), ParquetProblem> {
        self.values.clear();
        self.definition.clear();
        self.repetition.clear();
        (self.value, self.level) = (0, 0);
        let mut done = 0;
        while done < rows {
            let (records, _, _) = self
                .reader
                .read_records(
                    rows - done,
                    Some(&mut self.definition),
                    Some(&mut self.repetition),
                    &mut self.values,
                )
                .map_err(damaged)?;
            if records == 0 {
                return Err(ParquetProblem::Damaged {
                    message: "a column has fewer rows than its row group".to_owned(),
                });
            }
            done += records;
        }
        Ok(())
    }

    /// Returns the value of the next row of a required column.
    pub(super) fn required(&mut self) -> Option<&T::T> {
        self.value += 1;
        self.values.get(self.value - 1)
    }

    /// Returns the value of the next row of an optional column.
    pub(super) fn optional(&mut self) -> Option<&T::T> {
        let there = self.definition.get(self.level) == Some(&1);
        self.level += 1;
        match there {
            true => self.required(),
            false => None,
        }
    }

    /// Returns the values of the next row of a list.
    pub(super) fn list(&mut self) -> &[T::T] {
        let (first, level) = (self.value, self.level);
        if self.definition.get(level) == Some(&1) {
            self.value += 1;
        }
        self.level += 1;
        while self.repetition.get(self.level) == Some(&1) {
            // A continued list has a value here. If the level claims otherwise, the list is shorter
            // than the list of the other column.
            self.value += usize::from(self.definition.get(self.level) == Some(&1));
            self.level += 1;
        }
        debug_assert!(self.level > level);
        self.values.get(first..self.value).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use parquet::basic::Encoding;
    use parquet::file::metadata::ColumnChunkMetaData;
    use parquet::schema::types::SchemaDescriptor;

    use super::*;

    /// Builds a group whose first column claims the values of the case.
    fn group(
        rows: i64,
        values: i64,
        bytes: i64,
        offset: i64,
        how: Compression,
    ) -> RowGroupMetaData {
        let schema = Arc::new(SchemaDescriptor::new(schema::schema().unwrap()));
        let columns = (0..schema::COLUMNS).map(|index| {
            let chunk = ColumnChunkMetaData::builder(schema.column(index));
            let chunk = match index {
                0 => chunk
                    .set_num_values(values)
                    .set_total_compressed_size(bytes)
                    .set_data_page_offset(offset)
                    .set_compression(how),
                _ => chunk.set_num_values(rows),
            };
            chunk.build().unwrap()
        });
        RowGroupMetaData::builder(schema.clone())
            .set_num_rows(rows)
            .set_column_metadata(columns.collect())
            .build()
            .unwrap()
    }

    #[test]
    fn a_footer_claims_no_more_than_fits() {
        let plain = Compression::UNCOMPRESSED;
        let check = |rows, values, bytes, offset, how| {
            check_group(&group(rows, values, bytes, offset, how), 7, 100)
        };
        assert_eq!(check(5, 5, 96, 4, plain), Ok((5, 10)));
        let too_large = Err(ParquetProblem::TooLarge { group: 7 });
        assert_eq!(check(MAX_ROWS + 1, 5, 96, 4, plain), too_large);
        assert_eq!(check(5, MAX_VALUES + 1, 96, 4, plain), too_large);
        assert_eq!(check(5, 5, MAX_BYTES + 1, 4, plain), too_large);
        let snappy = check(5, 5, 96, 4, Compression::SNAPPY);
        assert!(matches!(
            snappy,
            Err(ParquetProblem::Compressed {
                group: 7,
                path: "time_ns"
            })
        ));
        for (rows, values, bytes, offset) in [
            (5, 5, 97, 4),
            (5, 5, -1, 4),
            (5, 5, 96, -1),
            (5, -1, 96, 4),
            (-1, 5, 96, 4),
            (5, 6, 96, 4),
        ] {
            let result = check(rows, values, bytes, offset, plain);
            assert!(
                matches!(result, Err(ParquetProblem::Damaged { .. })),
                "{rows} {values} {bytes} {offset}"
            );
        }
    }

    #[test]
    fn pages_with_oversized_claims_are_rejected() {
        use Encoding::*;
        let mut pages = Bounded {
            pages: Box::new(Claims(Vec::new())),
            left: 100,
            value_bytes: 4,
        };
        let data = |encoding, def_level_encoding| Page::DataPage {
            buf: vec![0; 64].into(),
            num_values: 1,
            encoding,
            def_level_encoding,
            rep_level_encoding: RLE,
            statistics: None,
        };
        let dictionary = |num_values, encoding| Page::DictionaryPage {
            buf: vec![0; 64].into(),
            num_values,
            encoding,
            is_sorted: false,
        };
        let cases = [
            (data(PLAIN, RLE), true),
            (data(RLE_DICTIONARY, RLE), true),
            (data(DELTA_BINARY_PACKED, RLE), true),
            (data(DELTA_LENGTH_BYTE_ARRAY, RLE), false),
            (data(DELTA_BYTE_ARRAY, RLE), false),
            (data(BYTE_STREAM_SPLIT, RLE), false),
            #[allow(deprecated)]
            (data(PLAIN, BIT_PACKED), false),
            (dictionary(16, PLAIN), true),
            (dictionary(17, PLAIN), false),
            (dictionary(1, DELTA_BYTE_ARRAY), false),
        ];
        for (page, sound) in cases {
            assert_eq!(pages.check(&page).is_ok(), sound, "{page:?}");
        }
    }

    struct Claims(Vec<u32>);

    impl Iterator for Claims {
        type Item = Result<Page, ParquetError>;

        fn next(&mut self) -> Option<Self::Item> {
            self.get_next_page().transpose()
        }
    }

    impl PageReader for Claims {
        fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
            Ok(self.0.pop().map(|num_values| Page::DataPage {
                buf: Vec::new().into(),
                num_values,
                encoding: Encoding::PLAIN,
                def_level_encoding: Encoding::RLE,
                rep_level_encoding: Encoding::RLE,
                statistics: None,
            }))
        }

        fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
            Ok(None)
        }

        fn skip_next_page(&mut self) -> Result<(), ParquetError> {
            Ok(())
        }
    }

    #[test]
    fn pages_claim_no_more_values_than_the_footer() {
        let mut pages = Bounded {
            pages: Box::new(Claims(vec![1, 5, 5])),
            left: 10,
            value_bytes: 4,
        };
        assert!(pages.get_next_page().unwrap().is_some());
        assert!(pages.get_next_page().unwrap().is_some());
        assert!(pages.get_next_page().is_err());
        let mut pages = Bounded {
            pages: Box::new(Claims(vec![u32::MAX])),
            left: 10,
            value_bytes: 4,
        };
        assert!(pages.get_next_page().is_err());
    }
}
