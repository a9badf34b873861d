//! What can be wrong with a Parquet file, in builds that read such files and in those that do not.

use std::fmt;

use crate::limits::LimitExceeded;

/// Why a Parquet file cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParquetProblem {
    /// This build cannot: it lacks the feature `parquet`.
    NotBuilt,
    /// The lines of a trace are asked for, which Parquet does not hold: it holds operations.
    NoLines,
    /// It has to be a file: its index stands at its end.
    NotSeekable,
    /// The file is no Parquet, or damaged.
    Damaged {
        /// What the decoder says.
        message: String,
    },
    /// A table, but not one of operations of this version: the metadata lacks this key or it says
    /// something else.
    Metadata {
        /// The key.
        key: &'static str,
    },
    /// A column is missing or of another type.
    Column {
        /// Where it should be, from 0.
        index: usize,
        /// Its path; empty for one too many.
        path: &'static str,
    },
    /// Pages are compressed, which would let a small file claim any amount of memory.
    Compressed {
        /// Row group, from 0.
        group: usize,
        /// Path of the column.
        path: &'static str,
    },
    /// More at once than is held in memory.
    TooLarge {
        /// Row group, from 0.
        group: usize,
    },
    /// The trace exceeds one of its [`TraceLimits`](crate::TraceLimits).
    Limit {
        /// Row, from 0.
        row: u64,
        /// The bound.
        excess: LimitExceeded,
    },
    /// A row says what no operation can.
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
