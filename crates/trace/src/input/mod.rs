//! Where traces come from: files, standard input, zstd streams, trace-cmd recordings.

mod dat;
mod source;

pub use source::Source;

pub(crate) use source::{Meter, read_error};
