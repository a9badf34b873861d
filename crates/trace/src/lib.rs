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
mod domain_type;
mod error;
mod info;
mod input;
mod interrupt;
mod judge;
mod limits;
mod op;
mod operations;
mod options;
mod page;
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
pub use domain_type::DomainType;
pub use error::{Field, Malformed, TraceError};
pub use info::{Burst, Bursts, DeviceInfo, Flow, FlowBurst, FlowBursts, Histogram, Info, Pages};
pub use input::{TraceSource, short_name};
pub use interrupt::Interrupt;
pub use judge::{
    Allocation, DeviceExposures, Exposure, ExposureEnd, Exposures, JudgeOptions, Judgement,
    PageTask, StaleWindow,
};
pub use limits::{LimitExceeded, MARK_BYTES, TraceLimits};
pub use op::{
    Chunk, DeviceIndex, MapClass, MapFlags, MappingId, Mark, Op, OpKind, PageOp, Position,
    SegmentSpan,
};
pub use operations::Operations;
pub use options::{Addresses, Attribution, PageEvents, TraceOptions};
pub use page::{KernelPfn, PageChange, PageEvent, TaskName};
pub use pair::ARENA_BYTES;
#[cfg(feature = "parquet")]
pub use parquet::{ConvertError, Written, write_parquet};
pub use printable::{printable, printable_line, steers_terminal};
pub use problem::ParquetProblem;
pub use record::{
    PageRecording, RecordError, Recording, RecordingSummary, Workload, stale_instances,
};
pub use render::render;
pub use store::{OpStore, StoreReplay};
pub use summary::{DeviceSummary, Summary};

/// A small real trace, compressed with zstd: the e1000e driver of a NIC loads, sends and receives.
/// `docs/TRACES.md` describes how it was cut.
pub const SAMPLE: &[u8] = include_bytes!("../data/sample.trace.zst");
