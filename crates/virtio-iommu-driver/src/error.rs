//! Errors of the driver.

use core::fmt;

use ringfence_types::{DomainId, InvalidationError, MemoryError, PfnRange, RequesterId};
use ringfence_virtio_iommu::spec;

/// The reason why an operation failed. Unless a variant says otherwise, the mappings and the
/// devices' rights are unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnitError {
    /// No virtio-iommu device answers.
    Absent,
    /// The device lacks a feature.
    Unsupported(Feature),
    /// The device did not accept the features that the driver chose.
    FeaturesRejected,
    /// The device has no such queue, or one that is too small.
    Queue(u16),
    /// The configuration is contradictory: empty ranges, no page size, or a `probe_size` that does
    /// not fit in a frame; or a field that keeps its value when the driver writes it.
    Configuration,
    /// The features or the configuration are not those of the start.
    CapabilitiesChanged,
    /// [`Options::first_endpoint`](crate::Options::first_endpoint) leaves no number of 32 bits for
    /// some requester IDs.
    EndpointNumbers,
    /// The configuration changed during every attempt to read it.
    ConfigurationChanges,
    /// The device did not end its reset within the limit of polls. Its frames stay allocated.
    ResetTimedOut,
    /// No frame is left, or a frame lies outside memory.
    Frames,
    /// The queue is full until earlier requests are answered.
    QueueFull,
    /// The id of the domain lies outside the device's domain range.
    Domain(DomainId),
    /// The domain bypasses the IOMMU and has no mappings, or has mappings and cannot bypass it.
    OtherKind(DomainId),
    /// The device is attached already; detach it first.
    Attached(RequesterId),
    /// The device is not attached.
    NotAttached(RequesterId),
    /// The request has no pages, or its range or addresses pass the end.
    Range,
    /// An address is not a multiple of the page size, or of the device's granule.
    Misaligned,
    /// The range lies outside the device's input range.
    OutsideInput(PfnRange),
    /// The range overlaps a mapping.
    Overlap(PfnRange),
    /// A page of the range is not mapped.
    NotMapped(PfnRange),
    /// The range covers only a part of a mapping. A device never splits mappings.
    Splits(PfnRange),
    /// The device answered a request with this status.
    Refused(Status),
    /// A property in the reply to PROBE is malformed.
    MalformedProperty,
    /// The device failed, now or earlier. [`Unit::recover`](crate::Unit::recover) resets it.
    Failed(Failure),
}

/// A feature that a device lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// Compliance with version 1 (`VIRTIO_F_VERSION_1`).
    Version1,
    /// Requests MAP and UNMAP (`VIRTIO_IOMMU_F_MAP_UNMAP`).
    MapUnmap,
    /// Request PROBE (`VIRTIO_IOMMU_F_PROBE`).
    Probe,
    /// Bypass domains (`VIRTIO_IOMMU_F_BYPASS_CONFIG`).
    BypassConfig,
}

/// The reason why the device cannot be used any more without a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Failure {
    /// The used index names more chains than the device has.
    UsedIndex,
    /// A used element names a chain that the device does not have: never, or answered already.
    UsedId(u32),
    /// A used element claims more bytes than its buffer has.
    UsedLength(u32),
    /// The device set `DEVICE_NEEDS_RESET`.
    NeedsReset,
    /// The status has `FAILED`, or lost bits that the driver set.
    Status(u8),
    /// The device did not answer a request within the limit of polls.
    TimedOut,
    /// The device refused a request that it has to accept: more unmaps than the driver keeps, the
    /// end of a mapping or an attachment that failed in part, or, in a recovery, what it accepted
    /// before.
    Refusals,
    /// The queue's memory cannot be accessed.
    Memory,
}

/// The status in a reply (virtio 1.3, section 5.13.6), other than OK.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// The reply is too short for a status.
    IoErr,
    /// The device does not support the request.
    Unsupp,
    /// Internal error of the device.
    DevErr,
    /// Parameters that contradict each other or the device's state.
    Inval,
    /// Parameters out of range.
    Range,
    /// No such domain or endpoint.
    NoEnt,
    /// Bad physical address.
    Fault,
    /// A limit of the device was reached.
    NoMem,
    /// A number that the specification does not define.
    Unknown(u8),
}

impl Status {
    /// Decodes the status byte.
    pub(crate) const fn decode(code: u8) -> Result<(), Self> {
        Err(match code {
            spec::VIRTIO_IOMMU_S_OK => return Ok(()),
            spec::VIRTIO_IOMMU_S_IOERR => Self::IoErr,
            spec::VIRTIO_IOMMU_S_UNSUPP => Self::Unsupp,
            spec::VIRTIO_IOMMU_S_DEVERR => Self::DevErr,
            spec::VIRTIO_IOMMU_S_INVAL => Self::Inval,
            spec::VIRTIO_IOMMU_S_RANGE => Self::Range,
            spec::VIRTIO_IOMMU_S_NOENT => Self::NoEnt,
            spec::VIRTIO_IOMMU_S_FAULT => Self::Fault,
            spec::VIRTIO_IOMMU_S_NOMEM => Self::NoMem,
            other => Self::Unknown(other),
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IoErr => "IOERR",
            Self::Unsupp => "UNSUPP",
            Self::DevErr => "DEVERR",
            Self::Inval => "INVAL",
            Self::Range => "RANGE",
            Self::NoEnt => "NOENT",
            Self::Fault => "FAULT",
            Self::NoMem => "NOMEM",
            Self::Unknown(code) => return write!(f, "the unknown status {code}"),
        })
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version1 => "VIRTIO_F_VERSION_1",
            Self::MapUnmap => "VIRTIO_IOMMU_F_MAP_UNMAP",
            Self::Probe => "VIRTIO_IOMMU_F_PROBE",
            Self::BypassConfig => "VIRTIO_IOMMU_F_BYPASS_CONFIG",
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UsedIndex => f.write_str("the used index is ahead of the available one"),
            Self::UsedId(id) => write!(f, "used element of chain {id}, which is not in flight"),
            Self::UsedLength(bytes) => write!(f, "used length of {bytes} beyond the buffer"),
            Self::NeedsReset => f.write_str("the device needs a reset"),
            Self::Status(status) => write!(f, "device status {status:#04x}"),
            Self::TimedOut => f.write_str("the device did not answer in time"),
            Self::Refusals => f.write_str("the device refused a request that it has to accept"),
            Self::Memory => f.write_str("a queue lies outside memory"),
        }
    }
}

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("no virtio-iommu device answers"),
            Self::Unsupported(feature) => write!(f, "the device does not offer {feature}"),
            Self::FeaturesRejected => f.write_str("the device rejected the features"),
            Self::Queue(number) => write!(f, "queue {number} is missing or too small"),
            Self::Configuration => f.write_str("the configuration is contradictory"),
            Self::CapabilitiesChanged => {
                f.write_str("the features or the configuration have changed since the start")
            }
            Self::EndpointNumbers => {
                f.write_str("first_endpoint leaves no number for some requester IDs")
            }
            Self::ConfigurationChanges => f.write_str("the configuration does not settle"),
            Self::ResetTimedOut => f.write_str("the device did not reset in time"),
            Self::Frames => f.write_str("no usable frame for the queues"),
            Self::QueueFull => f.write_str("the request queue is full"),
            Self::Domain(domain) => write!(f, "domain {domain} is outside the domain range"),
            Self::OtherKind(domain) => write!(f, "domain {domain} is of the other kind"),
            Self::Attached(device) => write!(f, "device {device} is already attached"),
            Self::NotAttached(device) => write!(f, "device {device} is not attached"),
            Self::Range => f.write_str("the range is empty or passes the last address"),
            Self::Misaligned => f.write_str("an address is misaligned"),
            Self::OutsideInput(range) => write!(f, "{range} is outside the input range"),
            Self::Overlap(range) => write!(f, "{range} overlaps a mapping"),
            Self::NotMapped(range) => write!(f, "{range} is not mapped"),
            Self::Splits(range) => write!(f, "{range} would split a mapping"),
            Self::Refused(status) => write!(f, "the device answered {status}"),
            Self::MalformedProperty => f.write_str("the reply to PROBE is malformed"),
            Self::Failed(failure) => failure.fmt(f),
        }
    }
}

impl core::error::Error for UnitError {}

impl From<Failure> for UnitError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Status> for UnitError {
    fn from(status: Status) -> Self {
        Self::Refused(status)
    }
}

impl From<MemoryError> for Failure {
    fn from(_: MemoryError) -> Self {
        Self::Memory
    }
}

impl From<Failure> for InvalidationError {
    fn from(_: Failure) -> Self {
        Self::Failed
    }
}
