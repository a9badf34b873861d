//! Why a request was refused, and what the driver is told.

use core::fmt;

use ringfence_types::IovaRange;

use crate::{DomainId, EndpointId, SinkError, spec};

/// What the tail of a reply says (virtio 1.3, section 5.13.6). IOERR is missing: it is the driver's
/// own word for a reply that was not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// It was done.
    Ok = spec::VIRTIO_IOMMU_S_OK,
    /// Not supported.
    Unsupp = spec::VIRTIO_IOMMU_S_UNSUPP,
    /// The device failed.
    DevErr = spec::VIRTIO_IOMMU_S_DEVERR,
    /// Invalid parameters.
    Inval = spec::VIRTIO_IOMMU_S_INVAL,
    /// Parameters out of range.
    Range = spec::VIRTIO_IOMMU_S_RANGE,
    /// No such endpoint or domain.
    NoEnt = spec::VIRTIO_IOMMU_S_NOENT,
    /// Bad guest-physical address.
    Fault = spec::VIRTIO_IOMMU_S_FAULT,
    /// A limit was reached.
    NoMem = spec::VIRTIO_IOMMU_S_NOMEM,
}

impl Status {
    /// The byte in the tail.
    #[inline]
    pub const fn code(self) -> u8 {
        self as u8
    }
}

/// What there is too much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LimitReached {
    /// As many mappings as [`VirtioIommuLimits::mappings`](crate::VirtioIommuLimits::mappings).
    Mappings,
    /// As many domains as [`VirtioIommuLimits::domains`](crate::VirtioIommuLimits::domains).
    Domains,
    /// As many endpoints as [`VirtioIommuLimits::endpoints`](crate::VirtioIommuLimits::endpoints).
    Endpoints,
    /// The host's memory.
    Memory,
}

impl fmt::Display for LimitReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mappings => "too many mappings",
            Self::Domains => "too many domains",
            Self::Endpoints => "too many endpoints",
            Self::Memory => "out of memory",
        })
    }
}

/// Why a request was refused. Nothing has changed then, with one exception:
/// [`RequestError::Blocked`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestError {
    /// The device-readable part is shorter than a head, or than a request of its type. No reply is
    /// written.
    TooShort {
        /// Bytes that the driver gave.
        bytes: usize,
    },
    /// The device-writable part has no room for a tail. No reply is written.
    NoTail {
        /// Bytes that the driver gave.
        bytes: usize,
    },
    /// No request has this type, or it is a PROBE that was not offered. No reply is written.
    UnknownType(u8),
    /// MAP or UNMAP without `VIRTIO_IOMMU_F_MAP_UNMAP` having been accepted.
    NotNegotiated,
    /// A reserved field that has to be zero is not.
    ReservedField,
    /// Flags that do not exist, or whose feature was not accepted.
    UnknownFlags(u32),
    /// The endpoint does not exist.
    NoEndpoint(EndpointId),
    /// The domain does not exist.
    NoDomain(DomainId),
    /// The domain lies outside the domain range.
    DomainOutOfRange(DomainId),
    /// The domain exists, and the flag for bypassing says otherwise than it does.
    BypassMismatch(DomainId),
    /// The domain is a bypass domain: it maps everything already.
    BypassDomain(DomainId),
    /// The endpoint is not attached to this domain.
    NotAttached {
        /// The endpoint.
        endpoint: EndpointId,
        /// The domain that the request names.
        domain: DomainId,
    },
    /// The domain maps what is reserved for the endpoint.
    Incompatible {
        /// The endpoint.
        endpoint: EndpointId,
        /// The domain.
        domain: DomainId,
    },
    /// The range ends before it begins.
    EndBeforeStart {
        /// `virt_start`.
        start: u64,
        /// `virt_end`.
        end: u64,
    },
    /// Not whole granules.
    Misaligned(IovaRange),
    /// Not inside the input range.
    OutsideInput(IovaRange),
    /// What it maps to is not inside the guest's physical memory.
    OutsidePhysical(IovaRange),
    /// Reserved for an endpoint of the domain.
    Reserved(IovaRange),
    /// A part of it is mapped already.
    Overlap(IovaRange),
    /// A mapping that the range does not cover entirely would be split.
    Splits(IovaRange),
    /// The PROBE has room for fewer bytes of properties than the device says it needs.
    ProbeTooShort {
        /// Bytes of properties that there is room for.
        bytes: usize,
    },
    /// A limit was reached.
    LimitReached(LimitReached),
    /// The sink refused.
    Sink(SinkError),
    /// The sink failed to unmap, now or earlier: the domain maps nothing any more, and no endpoint
    /// in it reaches anything until it is detached.
    Blocked(DomainId),
}

impl RequestError {
    /// The status that the driver reads; `None` if the reply is not written at all.
    #[inline]
    pub const fn status(&self) -> Option<Status> {
        Some(match self {
            Self::TooShort { .. } | Self::NoTail { .. } | Self::UnknownType(_) => return None,
            Self::NotNegotiated
            | Self::Incompatible { .. }
            | Self::Sink(SinkError::Unsupported) => Status::Unsupp,
            Self::ReservedField
            | Self::UnknownFlags(_)
            | Self::BypassMismatch(_)
            | Self::BypassDomain(_)
            | Self::NotAttached { .. }
            | Self::Reserved(_)
            | Self::Overlap(_)
            | Self::ProbeTooShort { .. } => Status::Inval,
            Self::NoEndpoint(_) | Self::NoDomain(_) => Status::NoEnt,
            Self::DomainOutOfRange(_)
            | Self::EndBeforeStart { .. }
            | Self::Misaligned(_)
            | Self::OutsideInput(_)
            | Self::Splits(_) => Status::Range,
            Self::OutsidePhysical(_) | Self::Sink(SinkError::BadAddress(_)) => Status::Fault,
            Self::LimitReached(_) | Self::Sink(SinkError::OutOfMemory) => Status::NoMem,
            Self::Sink(SinkError::WouldBlock | SinkError::CommitFailed | SinkError::Failed)
            | Self::Blocked(_) => Status::DevErr,
        })
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort { bytes } => write!(f, "a request of {bytes} bytes is too short"),
            Self::NoTail { bytes } => write!(f, "a reply of {bytes} bytes has no room for a tail"),
            Self::UnknownType(kind) => write!(f, "no request has type {kind}"),
            Self::NotNegotiated => f.write_str("the feature was not accepted"),
            Self::ReservedField => f.write_str("a reserved field is not zero"),
            Self::UnknownFlags(flags) => write!(f, "unknown flags {flags:#x}"),
            Self::NoEndpoint(endpoint) => write!(f, "there is no endpoint {endpoint}"),
            Self::NoDomain(domain) => write!(f, "there is no domain {domain}"),
            Self::DomainOutOfRange(domain) => write!(f, "domain {domain} is out of range"),
            Self::BypassMismatch(domain) => write!(f, "domain {domain} is of the other kind"),
            Self::BypassDomain(domain) => write!(f, "domain {domain} bypasses the IOMMU"),
            Self::NotAttached { endpoint, domain } => {
                write!(f, "endpoint {endpoint} is not attached to domain {domain}")
            }
            Self::Incompatible { endpoint, domain } => {
                write!(
                    f,
                    "domain {domain} maps what is reserved for endpoint {endpoint}"
                )
            }
            Self::EndBeforeStart { start, end } => write!(f, "{start:#x}..={end:#x} is no range"),
            Self::Misaligned(range) => write!(f, "{range} is not made of whole granules"),
            Self::OutsideInput(range) => write!(f, "{range} lies outside the input range"),
            Self::OutsidePhysical(range) => write!(f, "{range} maps to what is no memory"),
            Self::Reserved(range) => write!(f, "{range} is reserved"),
            Self::Overlap(range) => write!(f, "{range} is mapped in part"),
            Self::Splits(range) => write!(f, "{range} would split a mapping"),
            Self::ProbeTooShort { bytes } => write!(f, "no properties fit into {bytes} bytes"),
            Self::LimitReached(full) => full.fmt(f),
            Self::Sink(error) => write!(f, "the sink: {error}"),
            Self::Blocked(domain) => write!(f, "domain {domain} is blocked"),
        }
    }
}

impl core::error::Error for RequestError {}

impl From<SinkError> for RequestError {
    fn from(error: SinkError) -> Self {
        Self::Sink(error)
    }
}
