//! Linux DMA traces: parses text, trace-cmd and perf recordings, and stores operations compactly.
//!
//! The crate has two stages. [`text`] parses the lines that tracefs, `trace-cmd report` or `perf
//! script` print into raw events. [`Operations`] turns raw events into the operations of a replay:
//! maps and unmaps with physical addresses, each unmap paired with its map. Both stages stream, so
//! memory use does not grow with the trace.
#![forbid(unsafe_code)]

mod addresses;
mod anonymise;
mod devices;
mod error;
mod info;
mod input;
mod limits;
mod op;
mod operations;
mod options;
mod pair;
#[cfg(feature = "parquet")]
mod parquet;
mod printable;
mod problem;
mod record;
mod render;
mod runs;
mod store;
mod summary;
pub mod text;

pub use addresses::{AddressEvent, AddressKind};
pub use anonymise::{Anonymise, AnonymiseError};
pub use devices::{DeviceKind, Devices, TraceDevice};
pub use error::{Field, Malformed, TraceError};
pub use info::{Bursts, DeviceInfo, Flow, Info, Pages};
pub use input::TraceSource;
pub use limits::{LimitExceeded, MARK_BYTES, TraceLimits};
pub use op::{Chunk, DeviceIndex, MapClass, MapFlags, MappingId, Mark, Op, OpKind, SegmentSpan};
pub use operations::Operations;
pub use options::{Addresses, Attribution, TraceOptions};
pub use pair::ARENA_BYTES;
#[cfg(feature = "parquet")]
pub use parquet::{ConvertError, Written, write_parquet};
pub use printable::{printable, printable_line, steers_terminal};
pub use problem::ParquetProblem;
pub use record::{RecordError, Recording, RecordingSummary, Workload, stale_instances};
pub use render::render;
pub use store::{OpStore, StoreReplay};
pub use summary::{DeviceSummary, Summary};

/// A small real trace, compressed with zstd: the e1000e driver of a NIC loads, sends and receives.
/// `docs/TRACES.md` describes how it was cut.
pub const SAMPLE: &[u8] = include_bytes!("../data/sample.trace.zst");
