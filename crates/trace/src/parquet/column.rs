//! Reads one column of a row group and bounds the resources that it may claim.

use std::fs::File;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::DataType;
use parquet::file::metadata::RowGroupMetaData;

use super::pages::Pages;
use super::read::damaged;
use super::schema;
use crate::problem::ParquetProblem;

/// Maximum number of rows of a group.
const MAX_ROWS: i64 = 1 << 20;
/// Maximum number of values of a column in a group, absent values and empty lists included.
const MAX_VALUES: i64 = 4 << 20;
/// Maximum number of bytes of a column in a group.
const MAX_BYTES: i64 = 64 << 20;

/// Size of a row group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupSize {
    pub(super) rows: usize,
    /// Sum of its rows and segments.
    pub(super) values: u64,
    /// Bytes of the file that its columns take.
    pub(super) bytes: u64,
}

/// Checks the footer's values for a row group before any allocation for it.
pub(super) fn check_group(
    group: &RowGroupMetaData,
    number: usize,
    file_bytes: u64,
) -> Result<GroupSize, ParquetProblem> {
    let too_large = ParquetProblem::TooLarge { group: number };
    let mut bytes = 0_u64;
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
        let size = u64::try_from(chunk.compressed_size()).ok();
        let inside = u64::try_from(start)
            .ok()
            .zip(size)
            .and_then(|(start, size)| start.checked_add(size))
            .is_some_and(|end| end <= file_bytes);
        bytes = bytes.saturating_add(size.unwrap_or(0));
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
    let Ok(rows) = usize::try_from(rows) else {
        return damaged(format!("row group {number} has {rows} rows"));
    };
    let mut segments = 0;
    for (leaf, chunk) in schema::LEAVES.iter().zip(group.columns()) {
        let values = chunk.num_values();
        match leaf.shape {
            schema::Shape::Segments => segments = values.max(segments),
            _ if usize::try_from(values) != Ok(rows) => {
                let path = leaf.path;
                return damaged(format!(
                    "row group {number}: {path} has {values} of {rows} rows"
                ));
            }
            _ => {}
        }
    }
    Ok(GroupSize {
        rows,
        values: (rows as u64).saturating_add(segments as u64),
        bytes,
    })
}

/// Returns the reader of column `index` of a file. [`check_group`] must have accepted the group.
pub(super) fn column<T: DataType>(
    file: &Arc<File>,
    group: &RowGroupMetaData,
    index: usize,
) -> Column<T> {
    let chunk = group.column(index);
    let pages = Pages::new(Arc::clone(file), chunk);
    Column {
        reader: ColumnReaderImpl::new(chunk.column_descr_ptr(), Box::new(pages)),
        values: Vec::new(),
        definition: Vec::new(),
        repetition: Vec::new(),
        value: 0,
        level: 0,
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
        let size = GroupSize {
            rows: 5,
            values: 10,
            bytes: 96,
        };
        assert_eq!(check(5, 5, 96, 4, plain), Ok(size));
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
}
