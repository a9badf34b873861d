//! What the host holds of one guest, whichever kind its devices are of: memory for tables, and
//! which page of the guest stands behind each frame.
//!
//! ```text
//! driver maps a page -> a frame of the host for it (second stage) -> what its device is translated by
//! ```
//! The second stage is the guest's; what a device is translated by is the device's: tables in this
//! memory for one that is assigned ([`assigned`](crate::assigned)), the software IOMMU for one that
//! the host simulates.

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

/// The host's memory for tables, sparse: as much as a guest can make of the second stage, then of
/// I/O page tables.
const MEMORY: u64 = 512 << 20;
/// Where the second stage's tables begin; below is what leads from a device to its table.
const SECOND_STAGE: u64 = 4 << 20;
/// Where I/O page tables begin.
const IO_TABLES: u64 = 160 << 20;
const ALL: (u64, u64) = (4096, MEMORY);

/// The host, of one guest.
#[derive(Debug)]
pub(crate) struct Host {
    memory: Arc<Arena>,
    places: Arc<FrameRmap>,
    contexts: HostFrames,
    second_stage: HostFrames,
    io_tables: HostFrames,
    /// Of what the host does: those of the IOMMU, or of the device if the guest has none.
    counters: Arc<DeviceCounters>,
}

impl Host {
    /// Nothing is in its tables, and no page has a frame.
    ///
    /// # Errors
    /// If it does not map that much memory.
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
            places: Arc::default(),
            counters,
        })
    }

    /// Where tables are.
    pub(crate) fn memory(&self) -> &Arc<Arena> {
        &self.memory
    }

    /// The pages behind frames.
    pub(crate) fn places(&self) -> &Arc<FrameRmap> {
        &self.places
    }

    /// Frames for what leads from a device to its table.
    pub(crate) fn contexts(&self) -> &HostFrames {
        &self.contexts
    }

    /// Frames for I/O page tables.
    pub(crate) fn io_tables(&self) -> &HostFrames {
        &self.io_tables
    }

    pub(crate) fn counters(&self) -> &Arc<DeviceCounters> {
        &self.counters
    }
}
