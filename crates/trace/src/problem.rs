//! Errors of Parquet files, for builds with and without the feature `parquet`.

use std::fmt;

use crate::limits::LimitExceeded;

/// An error of a Parquet file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParquetProblem {
    /// The program was built without the feature `parquet`.
    NotBuilt,
    /// The caller asked for the lines of the trace, but a Parquet file holds only operations.
    NoLines,
    /// The input is not a regular file. The reader must seek, because the footer is at the end.
    NotSeekable,
    /// The file is not a Parquet file, or it is damaged.
    Damaged {
        /// Message of the decoder.
        message: String,
    },
    /// The file is a Parquet table, but not a table of operations of this version: this metadata
    /// key is missing or has another value.
    Metadata {
        /// The metadata key.
        key: &'static str,
    },
    /// A column is missing or of another type.
    Column {
        /// Expected index of the column, from 0.
        index: usize,
        /// Path of the column; empty for a surplus column.
        path: &'static str,
    },
    /// A column has compressed pages. The reader rejects them because a small compressed file could
    /// claim any amount of memory.
    Compressed {
        /// Row group, from 0.
        group: usize,
        /// Path of the column.
        path: &'static str,
    },
    /// A row group is larger than the reader holds in memory.
    TooLarge {
        /// Row group, from 0.
        group: usize,
    },
    /// The trace exceeds one of its [`TraceLimits`](crate::TraceLimits).
    Limit {
        /// Row, from 0.
        row: u64,
        /// The limit and, for some limits, the requested amount.
        excess: LimitExceeded,
    },
    /// A row has a value that no operation can have.
    Row {
        /// Row, from 0.
        row: u64,
        /// Path of the column.
        path: &'static str,
    },
}

impl fmt::Display for ParquetProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt => f.write_str(
                "Parquet, which is not built into this program; build with `--features parquet`",
            ),
            Self::NoLines => f.write_str(
                "a Parquet file holds operations, not the lines of a trace; use the text",
            ),
            Self::NotSeekable => f.write_str("Parquet has to be read from a file"),
            Self::Damaged { message } => write!(f, "damaged Parquet: {message}"),
            Self::Metadata { key } => {
                write!(f, "no table of operations of this version: metadata {key}")
            }
            Self::Column { index, path: "" } => write!(f, "column {index} is one too many"),
            Self::Column { index, path } => {
                write!(f, "column {index} should be {path} and is not")
            }
            Self::Compressed { group, path } => write!(
                f,
                "row group {group}, column {path}: compressed pages are not read"
            ),
            Self::TooLarge { group } => {
                write!(f, "row group {group} is too large to be held in memory")
            }
            Self::Limit { row, excess } => write!(f, "row {row}: {excess}"),
            Self::Row { row, path } => {
                write!(f, "row {row}, column {path}: no operation can say this")
            }
        }
    }
}

impl std::error::Error for ParquetProblem {}
