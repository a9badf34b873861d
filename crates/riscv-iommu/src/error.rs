//! Errors of the unit.

use core::fmt;

use ringfence_pgtable::{Levels, TableError};
use ringfence_types::{DomainId, InvalidationError, PhysAddr, RequesterId};

use crate::registers::Register;

/// An optional feature of the unit that a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// Little-endian access to tables and queues.
    LittleEndian,
    /// The schemes of RV64 for the second stage (`fctl.GXL` = 0).
    Gxl64,
    /// Interrupts by wire.
    WiredInterrupts,
    /// Interrupts by message.
    MessageInterrupts,
    /// First-stage tables of this depth.
    FirstStage(Levels),
    /// Second-stage tables of this depth.
    SecondStage(Levels),
    /// Process directories of this many process-id bits.
    ProcessBits(u32),
    /// MSI page tables (`MSI_FLAT`).
    MsiTranslation,
    /// Address translation services (`ATS`).
    Ats,
    /// Guest-physical addresses in translation completions (`T2GPA`).
    GuestAddressCompletions,
    /// Coherent accesses whatever memory type a guest selects, which
    /// [`Options::coherent_guests`](crate::Options::coherent_guests) states.
    CoherentGuests,
}

/// The reason why an operation of the unit failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnitError {
    /// No unit answers at the registers.
    Absent,
    /// The unit implements another major version of the specification.
    UnsupportedVersion(u8),
    /// The unit lacks the feature.
    Unsupported(Feature),
    /// The unit does not take the value that the driver wrote.
    Rejected {
        /// The register that kept another value.
        register: Register,
    },
    /// The unit did not finish an operation within the limit of polls.
    TimedOut {
        /// The register that shows the end of the operation.
        register: Register,
    },
    /// No mode of the device directory has that many device-id bits.
    DirectoryBits {
        /// The requested number.
        bits: u32,
    },
    /// The number of queue entries is not a power of two, or more than a frame holds.
    QueueEntries {
        /// The requested number.
        entries: u32,
    },
    /// The command queue cannot hold an invalidation of all caches for that many devices.
    QueueTooSmall,
    /// A table or a queue could not be allocated or accessed.
    Table(TableError),
    /// The device directory does not reach the device's id.
    DeviceBeyondDirectory {
        /// The requested device.
        device: RequesterId,
    },
    /// The process directory does not reach the process id.
    ProcessBeyondDirectory {
        /// The requested process.
        process: u32,
    },
    /// A process soft-context id has more than 20 bits.
    ProcessSpace {
        /// The requested id.
        id: u32,
    },
    /// The root of a table is misaligned, or wider than the unit's addresses.
    Root {
        /// Physical or guest-physical address of the root.
        at: PhysAddr,
    },
    /// The MSI address mask or pattern is wider than a guest-physical address.
    MsiAddress,
    /// Another table is in use under the same domain-id, or under the same PSCID of a guest.
    DomainMismatch {
        /// The requested domain.
        domain: DomainId,
    },
    /// The device is not attached.
    NotAttached {
        /// The requested device.
        device: RequesterId,
    },
    /// The device has no process directory that the driver owns.
    NoProcesses {
        /// The requested device.
        device: RequesterId,
    },
    /// The process id is in use, or not in use.
    Process {
        /// The requested process.
        process: u32,
    },
    /// An invalidation that the operation owes failed.
    Invalidation(InvalidationError),
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LittleEndian => f.write_str("little-endian tables and queues"),
            Self::Gxl64 => f.write_str("second-stage schemes of RV64"),
            Self::WiredInterrupts => f.write_str("interrupts by wire"),
            Self::MessageInterrupts => f.write_str("interrupts by message"),
            Self::FirstStage(levels) => {
                write!(f, "first-stage tables of Sv{}", levels.width())
            }
            Self::SecondStage(levels) => {
                write!(f, "second-stage tables of Sv{}x4", levels.width())
            }
            Self::ProcessBits(bits) => write!(f, "process directories of {bits} bits"),
            Self::MsiTranslation => f.write_str("MSI page tables"),
            Self::Ats => f.write_str("address translation services"),
            Self::GuestAddressCompletions => {
                f.write_str("guest-physical addresses in translation completions")
            }
            Self::CoherentGuests => f.write_str("a guest's first stage without coherent guests"),
        }
    }
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
            Self::UnsupportedVersion(version) => {
                write!(
                    f,
                    "version {version:#x} of the specification is unsupported"
                )
            }
            Self::Unsupported(Feature::CoherentGuests) => f.write_str(
                "a guest's first stage can bypass the CPU caches: set Options::coherent_guests if \
                 the platform prevents it",
            ),
            Self::Unsupported(feature) => write!(f, "the unit does not support {feature}"),
            Self::Rejected { register } => write!(f, "the unit rejected the value of {register}"),
            Self::TimedOut { register } => {
                write!(f, "the unit did not complete the operation of {register}")
            }
            Self::DirectoryBits { bits } => {
                write!(f, "no device directory has {bits} device-id bits")
            }
            Self::QueueEntries { entries } => write!(f, "a queue cannot have {entries} entries"),
            Self::QueueTooSmall => f.write_str("the command queue is too small for the devices"),
            Self::Table(error) => error.fmt(f),
            Self::DeviceBeyondDirectory { device } => {
                write!(f, "the device directory does not reach {device}")
            }
            Self::ProcessBeyondDirectory { process } => {
                write!(f, "the process directory does not reach process {process}")
            }
            Self::ProcessSpace { id } => {
                write!(f, "process soft-context id {id} has more than 20 bits")
            }
            Self::Root { at } => write!(f, "the root at {at} is misaligned or too wide"),
            Self::MsiAddress => f.write_str("the MSI address mask or pattern is too wide"),
            Self::DomainMismatch { domain } => {
                write!(f, "domain {domain} is in use with another table")
            }
            Self::NotAttached { device } => write!(f, "{device} is not attached"),
            Self::NoProcesses { device } => write!(f, "{device} has no process directory"),
            Self::Process { process } => {
                write!(f, "process {process} is already attached, or not attached")
            }
            Self::Invalidation(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for UnitError {}
