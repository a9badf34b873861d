//! Host-side state of one guest, for devices of any kind: memory for tables, and the guest page
//! behind each frame.
//!
//! ```text
//! map: driver -> second stage: host frame for the page -> translation of the device
//! ```
//! The second stage belongs to the guest; the translation belongs to the device. An assigned device
//! uses tables in this memory ([`assigned`](crate::assigned)); a simulated device uses the software
//! IOMMU.

mod frame_rmap;
mod pages;
mod second_stage;

use std::io;
use std::sync::Arc;

use ringfence_memory::{Arena, Frames};
use ringfence_types::{PhysAddr, PhysRange};

pub(crate) use self::frame_rmap::{FrameRmap, HostFrames};
pub use self::second_stage::HostPagePool;
pub(crate) use self::second_stage::Memory;
use crate::counters::DeviceCounters;

/// Size of the sparse host memory for tables: all that a guest can cause for the second stage, then
/// the I/O page tables.
const MEMORY: u64 = 512 << 20;
/// Start of the second stage's tables; the context tables are below.
const SECOND_STAGE: u64 = 4 << 20;
/// Start of the I/O page tables.
const IO_TABLES: u64 = 160 << 20;
const ALL: (u64, u64) = (4096, MEMORY);

/// The host of one guest.
#[derive(Debug)]
pub(crate) struct Host {
    memory: Arc<Arena>,
    rmap: Arc<FrameRmap>,
    contexts: HostFrames,
    second_stage: HostFrames,
    io_tables: HostFrames,
    /// Counters of the host's work: those of the IOMMU, or of the device if the guest has no IOMMU.
    counters: Arc<DeviceCounters>,
}

impl Host {
    /// Creates a host with empty tables and no frames.
    ///
    /// # Errors
    /// The process cannot map that much memory.
    pub(crate) fn new(counters: Arc<DeviceCounters>) -> io::Result<Self> {
        let memory = Arc::new(Arena::new(MEMORY).map_err(io::Error::other)?);
        let source = |from: u64, to: u64| {
            let region = PhysRange::new(PhysAddr::new(from), to - from);
            let region = region.ok_or(io::ErrorKind::InvalidInput)?;
            let frames = Frames::new(Arc::clone(&memory), region);
            Ok::<_, io::Error>(HostFrames::Tables(Arc::new(frames)))
        };
        Ok(Self {
            contexts: source(ALL.0, SECOND_STAGE)?,
            second_stage: source(SECOND_STAGE, IO_TABLES)?,
            io_tables: source(IO_TABLES, ALL.1)?,
            memory,
            rmap: Arc::default(),
            counters,
        })
    }

    /// Returns the memory of the tables.
    pub(crate) fn memory(&self) -> &Arc<Arena> {
        &self.memory
    }

    /// Returns the reverse map from frames to guest pages.
    pub(crate) fn rmap(&self) -> &Arc<FrameRmap> {
        &self.rmap
    }

    /// Returns the frames for context tables.
    pub(crate) fn contexts(&self) -> &HostFrames {
        &self.contexts
    }

    /// Returns the frames for I/O page tables.
    pub(crate) fn io_tables(&self) -> &HostFrames {
        &self.io_tables
    }

    pub(crate) fn counters(&self) -> &Arc<DeviceCounters> {
        &self.counters
    }
}
