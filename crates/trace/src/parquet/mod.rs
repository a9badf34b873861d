//! Converts operations to and from Parquet, for tools that read tables.
//!
//! Each row is an operation or a mark, in trace order, so the file has all data of a replay. The
//! devices and the [`Summary`](crate::Summary) do not fit into rows; they are in the footer's
//! key-value metadata ([`meta`]). [`schema`] lists the columns. Pages are encoded (deltas,
//! dictionaries) but not compressed, so a page of an untrusted file never takes more memory than
//! the file has bytes.
//!
//! The reader walks the footer and the page headers itself, by tables of their fields ([`thrift`]).
//! The decoder of the crate `parquet` gets only checked bytes.

mod check;
mod column;
mod footer;
mod meta;
mod pages;
mod read;
mod schema;
mod thrift;
mod write;

pub use write::{ConvertError, Written, write_parquet};

pub(crate) use read::Rows;
