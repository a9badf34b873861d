//! Errors of the unit.

use core::fmt;

use ringfence_pgtable::{Level, TableError};
use ringfence_types::{DomainId, InvalidationError, PageSize, PhysAddr, RequesterId};

use crate::registers::Register;

/// An optional feature of the unit that a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// Tables of stage 1.
    Stage1,
    /// Tables of stage 2.
    Stage2,
    /// Tables of VMSAv8-64.
    Aarch64,
    /// Tables with little-endian entries.
    LittleEndian,
    /// The terminate model: STALL_MODEL does not force faulting transactions to stall.
    TerminateModel,
    /// Writable base registers of the stream table and the queues: TABLES_PRESET and QUEUES_PRESET
    /// are 0.
    WritableBases,
    /// Tables of this granule.
    Granule(PageSize),
    /// Stage 2 that forces write-back (FWB).
    ForcedWriteBack,
    /// Coherent accesses whatever attributes a guest selects: a table with
    /// [`PageTable::forced_write_back`](crate::PageTable::forced_write_back), or the statement
    /// [`Options::coherent_guests`](crate::Options::coherent_guests).
    CoherentGuests,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stage1 => "stage 1",
            Self::Stage2 => "stage 2",
            Self::Aarch64 => "tables of VMSAv8-64",
            Self::LittleEndian => "tables with little-endian entries",
            Self::TerminateModel => "termination of faulting transactions",
            Self::WritableBases => "tables and queues at addresses that the driver selects",
            Self::Granule(size) => return write!(f, "a granule of {size}"),
            Self::ForcedWriteBack => "a stage 2 that forces write-back (S2FWB)",
            Self::CoherentGuests => "coherent accesses whatever attributes a guest selects",
        })
    }
}

/// A queue of the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnitQueue {
    /// The command queue.
    Commands,
    /// The event queue.
    Events,
}

impl fmt::Display for UnitQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Commands => "command queue",
            Self::Events => "event queue",
        })
    }
}

/// The reason why an operation of the unit failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnitError {
    /// No unit answers at the registers.
    Absent,
    /// The unit lacks the feature.
    Unsupported(Feature),
    /// The unit did not finish an operation within the limit of polls.
    TimedOut {
        /// The register that shows the end of the operation.
        register: Register,
    },
    /// The unit has fewer bits of stream ids.
    StreamIdBits {
        /// The requested number.
        bits: u32,
    },
    /// The memory for the stream table is misaligned or too small.
    StreamTable {
        /// The bytes that the table needs, and its alignment.
        bytes: u64,
    },
    /// The number of entries is not a power of two, fewer than the driver needs, or more than the
    /// unit or a frame holds.
    QueueEntries {
        /// Command queue or event queue.
        queue: UnitQueue,
        /// The requested number.
        entries: u32,
        /// The fewest entries: 16 commands, 2 event records.
        fewest: u32,
        /// The most entries.
        most: u32,
    },
    /// A table or a queue could not be allocated or accessed.
    Table(TableError),
    /// The stream table does not reach the device.
    DeviceBeyondTable {
        /// The requested device.
        device: RequesterId,
    },
    /// The domain-id has more bits than an ASID or a VMID of the unit, or is 0 for stage 2.
    DomainId {
        /// The requested domain.
        domain: DomainId,
    },
    /// The unit does not translate addresses of that many bits in this stage.
    Width {
        /// The requested number.
        width: u32,
    },
    /// A walk for addresses of that many bits cannot begin at the root's level. In stage 2, the
    /// highest level also needs a unit with enough physical address bits.
    StartLevel {
        /// The address bits of the table.
        width: u32,
        /// The level of the root. Arm's number is 4 minus this one.
        level: Level,
    },
    /// The root of a table or a context descriptor is misaligned or too wide.
    Root {
        /// Physical or guest-physical address of the root.
        at: PhysAddr,
    },
    /// Another table is in use under the same domain-id.
    DomainMismatch {
        /// The requested domain.
        domain: DomainId,
    },
    /// The device is not attached.
    NotAttached {
        /// The requested device.
        device: RequesterId,
    },
    /// An invalidation that the operation owes failed.
    Invalidation(InvalidationError),
}

impl From<TableError> for UnitError {
    fn from(error: TableError) -> Self {
        Self::Table(error)
    }
}

impl From<InvalidationError> for UnitError {
    fn from(error: InvalidationError) -> Self {
        Self::Invalidation(error)
    }
}

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("no unit answers at the registers"),
            Self::Unsupported(Feature::CoherentGuests) => f.write_str(
                "a guest's stage 1 can bypass the CPU caches: use a table with forced write-back, \
                 or set Options::coherent_guests if the platform prevents it",
            ),
            Self::Unsupported(feature) => write!(f, "the unit does not support {feature}"),
            Self::TimedOut { register } => {
                write!(f, "the unit did not complete the operation of {register}")
            }
            Self::StreamIdBits { bits } => {
                write!(f, "the unit has fewer than {bits} bits of stream ids")
            }
            Self::StreamTable { bytes } => {
                write!(
                    f,
                    "the stream table needs {bytes} bytes, aligned to its size"
                )
            }
            Self::QueueEntries {
                queue,
                entries,
                fewest,
                most,
            } => write!(
                f,
                "the {queue} cannot have {entries} entries: a power of two from {fewest} to {most}"
            ),
            Self::Table(error) => error.fmt(f),
            Self::DeviceBeyondTable { device } => {
                write!(f, "the stream table does not reach {device}")
            }
            Self::DomainId { domain } => {
                write!(f, "the unit cannot tag entries with domain-id {domain}")
            }
            Self::Width { width } => {
                write!(f, "the unit does not translate addresses of {width} bits")
            }
            Self::StartLevel { width, level } => write!(
                f,
                "a walk of {width} bits cannot begin at a table of {} levels",
                level.get()
            ),
            Self::Root { at } => write!(f, "the root at {at} is misaligned or too wide"),
            Self::DomainMismatch { domain } => {
                write!(f, "domain {domain} is in use with another table")
            }
            Self::NotAttached { device } => write!(f, "{device} is not attached"),
            Self::Invalidation(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for UnitError {}
