//! Sources of traces: files, standard input, zstd streams, trace-cmd recordings.

mod dat;
mod source;

pub use source::{TraceSource, short_name};

pub(crate) use source::{ByteCounter, read_error};
