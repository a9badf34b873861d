//! Parses the text of tracefs, `trace-cmd report` and `perf script` into raw events.
//!
//! A line passes these steps:
//!
//! - `lines` splits it from the input.
//! - `prefix` parses task, CPU and time.
//! - `payload` parses the event's fields.
//! - [`TraceReader`] appends the event to a [`RawChunk`].

mod cursor;
mod event;
mod header;
mod lines;
mod payload;
mod prefix;
mod reader;

pub use event::{ExecutionContext, ListSpan, RawChunk, RawEvent, RawKind};
pub use reader::{Counts, TraceReader};

pub(crate) use payload::MAX_BYTES;
pub(crate) use reader::Text;
