//! Errors of the unit.

use core::fmt;

use ringfence_pgtable::{Level, Levels, TableError};
use ringfence_types::{DomainId, InvalidationError, PhysAddr, RequesterId};

use crate::registers::Register;

/// The reason why an operation of the unit failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnitError {
    /// No unit answers at the registers.
    Absent,
    /// The unit did not finish an operation within the limit of polls.
    TimedOut {
        /// The register that shows the end of the operation.
        register: Register,
    },
    /// The memory for the device table is misaligned or smaller than a page.
    DeviceTable,
    /// A table or a queue could not be allocated or accessed.
    Table(TableError),
    /// The device table has no entry for the device.
    DeviceBeyondTable {
        /// The requested device.
        device: RequesterId,
    },
    /// Domain 0 tags blocked and passed-through devices.
    ReservedDomain,
    /// The unit does not walk host tables of that depth (EFR\[HATS\]).
    HostLevels {
        /// The requested depth.
        levels: Level,
    },
    /// The unit does not walk guest tables of that depth for requests without a PASID (EFR\[GTSup,
    /// GATS, GLXSup, GIoSup\]).
    GuestLevels {
        /// The requested depth.
        levels: Levels,
    },
    /// The root of a table is misaligned, or wider than an entry.
    Root {
        /// Physical address of the root.
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
            Self::TimedOut { register } => {
                write!(f, "{register} did not show the end of an operation in time")
            }
            Self::DeviceTable => {
                f.write_str("the memory for the device table is misaligned or less than 4 KiB")
            }
            Self::Table(error) => error.fmt(f),
            Self::DeviceBeyondTable { device } => {
                write!(f, "the device table has no entry for {device}")
            }
            Self::ReservedDomain => f.write_str("domain 0 is reserved for blocked devices"),
            Self::HostLevels { levels } => {
                write!(f, "the unit does not walk host tables from {levels}")
            }
            Self::GuestLevels { levels } => {
                write!(f, "the unit does not walk guest tables of depth {levels:?}")
            }
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
