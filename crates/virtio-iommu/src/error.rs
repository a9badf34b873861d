//! Errors of requests and their statuses.

use core::fmt;

use ringfence_types::IovaRange;

use crate::{DomainId, EndpointId, SinkError, spec};

/// Status in the tail of a reply (virtio 1.3, section 5.13.6). IOERR is missing: only the driver
/// uses it, for a reply without a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// The request succeeded.
    Ok = spec::VIRTIO_IOMMU_S_OK,
    /// The device does not support the request.
    Unsupp = spec::VIRTIO_IOMMU_S_UNSUPP,
    /// The device failed.
    DevErr = spec::VIRTIO_IOMMU_S_DEVERR,
    /// The request has invalid parameters.
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
    /// Returns the byte in the tail.
    #[inline]
    pub const fn code(self) -> u8 {
        self as u8
    }
}

/// A limit that was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LimitReached {
    /// Number of mappings: [`VirtioIommuLimits::mappings`](crate::VirtioIommuLimits::mappings).
    Mappings,
    /// Number of domains: [`VirtioIommuLimits::domains`](crate::VirtioIommuLimits::domains).
    Domains,
    /// Number of endpoints: [`VirtioIommuLimits::endpoints`](crate::VirtioIommuLimits::endpoints).
    Endpoints,
    /// Memory of the host: an allocation failed.
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

/// Reason why a request failed. The device is then unchanged, except for [`RequestError::Blocked`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestError {
    /// The device-readable part is shorter than a head, or than a request of its type. The device
    /// writes no reply.
    TooShort {
        /// Length of the device-readable part.
        bytes: usize,
    },
    /// The device-writable part has no room for a tail. The device writes no reply.
    NoTail {
        /// Length of the device-writable part.
        bytes: usize,
    },
    /// Unknown request type, or a PROBE or `IOTLB_FLUSH` although it was not offered or accepted.
    /// The device writes no reply.
    UnknownType(u8),
    /// MAP or UNMAP although the driver has not accepted `VIRTIO_IOMMU_F_MAP_UNMAP`.
    NotNegotiated,
    /// A reserved field that must be zero is not.
    ReservedField,
    /// Unknown flags, or flags whose feature the driver has not accepted.
    UnknownFlags(u32),
    /// The endpoint does not exist.
    NoEndpoint(EndpointId),
    /// The domain does not exist.
    NoDomain(DomainId),
    /// The domain id is outside the domain range.
    DomainOutOfRange(DomainId),
    /// The bypass flag contradicts the existing domain.
    BypassMismatch(DomainId),
    /// The flag of [lazy mode](crate::lazy) contradicts the existing domain, or the bypass flag.
    LazyMismatch(DomainId),
    /// An `IOTLB_FLUSH` of a domain that is not in [lazy mode](crate::lazy).
    NotLazy(DomainId),
    /// The domain is a bypass domain, which maps everything already.
    BypassDomain(DomainId),
    /// The endpoint is not attached to this domain.
    NotAttached {
        /// The endpoint of the request.
        endpoint: EndpointId,
        /// The domain of the request.
        domain: DomainId,
    },
    /// The domain maps a reserved region of the endpoint.
    Incompatible {
        /// The endpoint of the request.
        endpoint: EndpointId,
        /// The domain of the request.
        domain: DomainId,
    },
    /// `virt_end` is below `virt_start`.
    EndBeforeStart {
        /// Field `virt_start` of the request.
        start: u64,
        /// Field `virt_end` of the request.
        end: u64,
    },
    /// The range is not aligned to the granule.
    Misaligned(IovaRange),
    /// The range is outside the input range.
    OutsideInput(IovaRange),
    /// The range maps to addresses outside the guest-physical range.
    OutsidePhysical(IovaRange),
    /// The range overlaps a reserved region of an endpoint of the domain.
    Reserved(IovaRange),
    /// The range overlaps a mapping.
    Overlap(IovaRange),
    /// The range covers only a part of a mapping, which would split it.
    Splits(IovaRange),
    /// The buffer of the PROBE is shorter than `probe_size`.
    ProbeTooShort {
        /// Length of the buffer for properties.
        bytes: usize,
    },
    /// A limit was reached.
    LimitReached(LimitReached),
    /// The sink refused the operation.
    Sink(SinkError),
    /// The sink failed to unmap, now or earlier. The domain has no mappings, and its endpoints have
    /// no access until they are detached.
    Blocked(DomainId),
}

impl RequestError {
    /// Returns the status for the driver; `None` if the device writes no reply.
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
            | Self::LazyMismatch(_)
            | Self::NotLazy(_)
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
            Self::TooShort { bytes } => {
                write!(f, "the request of {bytes} bytes is too short for its type")
            }
            Self::NoTail { bytes } => write!(
                f,
                "the reply buffer of {bytes} bytes has no room for a tail"
            ),
            Self::UnknownType(kind) => write!(f, "unknown request type {kind}"),
            Self::NotNegotiated => {
                f.write_str("the driver has not accepted VIRTIO_IOMMU_F_MAP_UNMAP")
            }
            Self::ReservedField => f.write_str("a reserved field is not zero"),
            Self::UnknownFlags(flags) => write!(f, "unknown flags {flags:#x}"),
            Self::NoEndpoint(endpoint) => write!(f, "endpoint {endpoint} does not exist"),
            Self::NoDomain(domain) => write!(f, "domain {domain} does not exist"),
            Self::DomainOutOfRange(domain) => {
                write!(f, "domain {domain} is outside the domain range")
            }
            Self::BypassMismatch(domain) => {
                write!(f, "the bypass flag contradicts domain {domain}")
            }
            Self::LazyMismatch(domain) => {
                write!(f, "the flag of lazy mode contradicts domain {domain}")
            }
            Self::NotLazy(domain) => write!(f, "domain {domain} is not in lazy mode"),
            Self::BypassDomain(domain) => write!(f, "domain {domain} bypasses the IOMMU"),
            Self::NotAttached { endpoint, domain } => {
                write!(f, "endpoint {endpoint} is not attached to domain {domain}")
            }
            Self::Incompatible { endpoint, domain } => {
                write!(
                    f,
                    "domain {domain} maps a reserved region of endpoint {endpoint}"
                )
            }
            Self::EndBeforeStart { start, end } => {
                write!(f, "range {start:#x}..={end:#x} ends before it starts")
            }
            Self::Misaligned(range) => write!(f, "{range} is not aligned to the granule"),
            Self::OutsideInput(range) => write!(f, "{range} lies outside the input range"),
            Self::OutsidePhysical(range) => {
                write!(f, "{range} maps to addresses outside guest memory")
            }
            Self::Reserved(range) => write!(f, "{range} overlaps a reserved region"),
            Self::Overlap(range) => write!(f, "{range} overlaps a mapping"),
            Self::Splits(range) => write!(f, "{range} would split a mapping"),
            Self::ProbeTooShort { bytes } => write!(
                f,
                "the PROBE buffer of {bytes} bytes is shorter than probe_size"
            ),
            Self::LimitReached(full) => full.fmt(f),
            Self::Sink(error) => write!(f, "the sink failed: {error}"),
            Self::Blocked(domain) => {
                write!(f, "domain {domain} is blocked: the sink failed to unmap")
            }
        }
    }
}

impl core::error::Error for RequestError {}

impl From<SinkError> for RequestError {
    fn from(error: SinkError) -> Self {
        Self::Sink(error)
    }
}
