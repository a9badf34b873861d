//! Operations as Parquet, for tools that read tables, and back.
//!
//! One row an operation or mark, in trace order, so that the file holds all that a replay needs.
//! What no row can hold, the devices and the [`Summary`](crate::Summary), stands in the footer's
//! key-value metadata ([`meta`]). Columns: [`schema`]. Pages are encoded (deltas, dictionaries),
//! not compressed: then a page never takes more memory than the file has bytes, whoever wrote it.

mod check;
mod column;
mod footer;
mod meta;
mod read;
mod schema;
mod write;

pub use write::{ConvertError, Written, write_parquet};

pub(crate) use read::Rows;
