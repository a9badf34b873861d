//! Text to raw events: what tracefs, `trace-cmd report` and `perf script` print.
//!
//! The path of a line: `lines` cuts it from the input, `prefix` reads task, CPU and time,
//! `payload` reads what the event says, and [`TraceReader`] puts it into a [`RawChunk`].

mod cursor;
mod event;
mod header;
mod lines;
mod payload;
mod prefix;
mod reader;

pub use event::{Context, ListSpan, RawChunk, RawEvent, RawKind};
pub use reader::{Counts, TraceReader};

pub(crate) use payload::MAX_BYTES;
pub(crate) use reader::Text;
