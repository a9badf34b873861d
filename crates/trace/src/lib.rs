//! Linux DMA traces: parses text, trace-cmd and perf recordings, and stores operations compactly.
//!
//! The crate has two stages. [`text`] parses the lines that tracefs, `trace-cmd report` or `perf
//! script` print into raw events. [`Operations`] turns raw events into the operations of a replay:
//! maps and unmaps with physical addresses, each unmap paired with its map. Both stages stream, so
//! memory use does not grow with the trace.
//!
//! A network card receives one frame:
//!
//! ```
//! use ringfence_trace::{Chunk, OpKind, Operations, TraceOptions};
//! use ringfence_types::Direction;
//!
//! let text = "\
//! irq/1-9 [000] ..... 1.000100: dma_map_page: 0000:00:03.0 dir=FROM_DEVICE dma_addr=fffff040 \
//!     size=1500 phys_addr=12345040 attrs=
//! irq/1-9 [000] ..... 1.000350: dma_unmap_page: 0000:00:03.0 dir=FROM_DEVICE dma_addr=fffff040 \
//!     size=1500 attrs=
//! ";
//! let mut operations = Operations::new("frame", text.as_bytes(), TraceOptions::default());
//! let mut chunk = Chunk::default();
//! let mut held = Vec::new();
//! while operations.next_chunk(&mut chunk)? {
//!     for op in &chunk.ops {
//!         match op.kind {
//!             OpKind::Map { id, direction, segments, .. } => {
//!                 assert_eq!(direction, Direction::FromDevice);
//!                 let buffer = chunk.segments_of(segments)[0];
//!                 assert_eq!((buffer.start().get(), buffer.bytes()), (0x1234_5040, 1500));
//!                 held.push((id, op.time));
//!             }
//!             // The unmap names its map, although the kernel prints only the address.
//!             OpKind::Unmap { id } => {
//!                 assert_eq!(held[0].0, id);
//!                 assert_eq!(op.time.0 - held[0].1.0, 250_000);
//!             }
//!         }
//!     }
//! }
//! let summary = operations.summary();
//! assert_eq!((summary.maps, summary.unmaps, summary.live_at_end), (1, 1, 0));
//! # Ok::<(), ringfence_trace::TraceError>(())
//! ```
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
    Allocation, DeviceExposures, ExposureEnd, Exposures, JudgeOptions, Judgement, PageExposure,
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
