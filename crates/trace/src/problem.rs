//! Errors of Parquet files, for builds with and without the feature `parquet`.

use crate::limits::LimitExceeded;

/// An error of a Parquet file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParquetProblem {
    /// The program was built without the feature `parquet`.
    #[error("this program cannot read Parquet; build it with `--features parquet`")]
    NotBuilt,
    /// The caller asked for the lines of the trace, but a Parquet file holds only operations.
    #[error("a Parquet file holds operations, not the lines of a trace; use the trace's text")]
    NoLines,
    /// The input is not a regular file. The reader must seek, because the footer is at the end.
    #[error("cannot read Parquet from a pipe; give the path of a file")]
    NotSeekable,
    /// The file is not a Parquet file, or it is damaged.
    #[error("damaged Parquet: {message}")]
    Damaged {
        /// Message of the decoder.
        message: String,
    },
    /// The file is a Parquet table, but not a table of operations of this version: this metadata
    /// key is missing or has another value.
    #[error("not a table of operations of this version: metadata {key} is missing or different")]
    Metadata {
        /// The metadata key.
        key: &'static str,
    },
    /// A column is missing or of another type.
    #[error("column {index} is not {}", expected_column(.path))]
    Column {
        /// Expected index of the column, from 0.
        index: usize,
        /// Path of the column; empty for a surplus column.
        path: &'static str,
    },
    /// A column has compressed pages. The reader rejects them because a small compressed file could
    /// claim any amount of memory.
    #[error(
        "row group {group}, column {path}: cannot read compressed pages; write the file without \
        compression"
    )]
    Compressed {
        /// Row group, from 0.
        group: usize,
        /// Path of the column.
        path: &'static str,
    },
    /// A row group is larger than the reader holds in memory.
    #[error("row group {group} does not fit in memory; write smaller row groups")]
    TooLarge {
        /// Row group, from 0.
        group: usize,
    },
    /// The trace exceeds one of its [`TraceLimits`](crate::TraceLimits).
    #[error("row {row}: {excess}")]
    Limit {
        /// Row, from 0.
        row: u64,
        /// The limit and, for some limits, the requested amount.
        excess: LimitExceeded,
    },
    /// A row has a value that no operation can have.
    #[error("row {row}, column {path}: no operation has this value")]
    Row {
        /// Row, from 0.
        row: u64,
        /// Path of the column.
        path: &'static str,
    },
}

/// Describes the column that was expected: its path, or none if the column is surplus.
fn expected_column(path: &'static str) -> &'static str {
    match path {
        "" => "expected",
        path => path,
    }
}
