//! Errors of a unit.

use core::fmt;

use ringfence_pgtable::{Levels, TableError};
use ringfence_types::{DomainId, InvalidationError, Pasid, PhysAddr, RequesterId};

/// The reason why an operation on a unit failed. Unless a variant says otherwise, the tables and
/// the devices' rights are unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnitError {
    /// The capability registers read as all ones: no unit answers.
    Absent,
    /// Translation is already enabled, by firmware or by another driver.
    AlreadyEnabled,
    /// The unit lacks a feature.
    Unsupported(Feature),
    /// The unit walks no table of this kind and depth (SAGAW, FS5LP).
    Depth(Levels),
    /// The unit does not accept the domain-id (ND, caching mode).
    Domain(DomainId),
    /// The domain already has another table. Caches are tagged by domain-id, so that devices would
    /// reach each other's pages.
    OtherTable(DomainId),
    /// The PASID is wider than the unit's (PSS) or than the directory.
    PasidBeyondWidth(Pasid),
    /// The root of the table is not aligned to 4 KiB.
    Misaligned(PhysAddr),
    /// The device is attached already; detach it first.
    Attached(RequesterId),
    /// The device is not attached.
    NotAttached(RequesterId),
    /// A table of the unit could not be written.
    Table(TableError),
    /// A register did not change within the limit of polls.
    TimedOut {
        /// The register that the driver polled.
        register: Register,
    },
    /// An invalidation failed. After an attach, the device is blocked. After a detach, caches may
    /// still hold its translations: detach it again, and free no page before that succeeds.
    Invalidation(InvalidationError),
}

/// The register whose bits did not change in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Register {
    /// Global status (GSTS_REG).
    GlobalStatus,
    /// Context command (CCMD_REG).
    ContextCommand,
    /// IOTLB invalidate (IOTLB_REG).
    IotlbInvalidate,
    /// Invalidation queue head (IQH_REG).
    QueueHead,
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GlobalStatus => "GSTS_REG",
            Self::ContextCommand => "CCMD_REG",
            Self::IotlbInvalidate => "IOTLB_REG",
            Self::QueueHead => "IQH_REG",
        })
    }
}

/// A feature that a unit lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// Scalable mode (SMTS).
    ScalableMode,
    /// The invalidation queue (QI).
    Queue,
    /// Register-based invalidation, which exists in legacy mode only.
    RegisterInvalidation,
    /// Second-stage translation in scalable mode (SSTS).
    SecondStage,
    /// First-stage translation, which exists in scalable mode only (FSTS).
    FirstStage,
    /// Untranslated requests (PT).
    PassThrough,
    /// Requests with PASID, which exist in scalable mode only (PASID).
    Pasid,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ScalableMode => "scalable mode",
            Self::Queue => "queued invalidation",
            Self::RegisterInvalidation => "register-based invalidation",
            Self::SecondStage => "second-stage translation",
            Self::FirstStage => "first-stage translation",
            Self::PassThrough => "pass-through",
            Self::Pasid => "requests with PASID",
        })
    }
}

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("no unit answers"),
            Self::AlreadyEnabled => f.write_str("translation is already enabled"),
            Self::Unsupported(feature) => write!(f, "the unit does not support {feature}"),
            Self::Depth(levels) => {
                write!(f, "the unit walks no table of {} bits", levels.width())
            }
            Self::Domain(domain) => write!(f, "the unit does not accept domain-id {domain}"),
            Self::OtherTable(domain) => write!(f, "domain {domain} has another table"),
            Self::PasidBeyondWidth(pasid) => write!(f, "PASID {pasid} is too wide"),
            Self::Misaligned(root) => write!(f, "the table at {root} is misaligned"),
            Self::Attached(device) => write!(f, "device {device} is already attached"),
            Self::NotAttached(device) => write!(f, "device {device} is not attached"),
            Self::Table(TableError::OutOfFrames) => f.write_str("out of frames for tables"),
            Self::Table(_) => f.write_str("a table lies outside memory"),
            Self::TimedOut { register } => write!(f, "{register} did not change in time"),
            Self::Invalidation(error) => write!(f, "invalidation: {error}"),
        }
    }
}

impl core::error::Error for UnitError {}

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
