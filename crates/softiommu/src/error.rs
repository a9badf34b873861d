//! Errors of mapping and attachment changes. A [`Fault`](ringfence_types::Fault) reports errors of
//! a device.

use ringfence_types::{DomainId, Iova, IovaRange, PhysAddr, RequesterId};

/// The calling thread has a read section open ([`ReadSection`](crate::ReadSection)), of this or
/// another unit. A change of mappings would wait for itself, or for a thread that waits for it.
/// Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error("this thread has a read section open and would wait for itself; close the section first")]
pub struct ReadSectionOpen;

/// Error of a map. The domain is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error("cannot map {range} in domain {domain}: {reason}")]
pub struct DomainMapError {
    /// Id of the domain.
    pub domain: DomainId,
    /// The requested range.
    pub range: IovaRange,
    /// Reason of the error.
    pub reason: DomainMapReason,
}

/// Reason why a map failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum DomainMapReason {
    /// The range does not consist of whole 4 KiB pages.
    #[error("the range does not consist of whole 4 KiB pages")]
    NotPages,
    /// The physical address is not page-aligned, or the physical range exceeds 2^64 - 1.
    #[error("{at} is not the start of whole physical pages")]
    BadMemory {
        /// Start of the physical range.
        at: PhysAddr,
    },
    /// Part of the range lies beyond the table's width.
    #[error("the range extends beyond the width of the table")]
    BeyondWidth,
    /// A page of the range is already mapped.
    #[error("{iova} is already mapped")]
    Mapped {
        /// Address of the first such page.
        iova: Iova,
    },
    /// The mapping needs more tables than the domain may have
    /// ([`SoftIommuLimits::tables`](crate::SoftIommuLimits::tables)).
    #[error("the domain has its maximum number of tables")]
    OutOfTables,
    /// The calling thread has a read section open, see [`ReadSectionOpen`].
    #[error("{ReadSectionOpen}")]
    ReadSectionOpen,
}

/// Error of an unmap. The domain is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum DomainUnmapError {
    /// The range does not consist of whole 4 KiB pages.
    #[error("cannot unmap {range} in domain {domain}: it does not consist of whole 4 KiB pages")]
    NotPages {
        /// Id of the domain.
        domain: DomainId,
        /// The requested range.
        range: IovaRange,
    },
    /// The calling thread has a read section open.
    #[error(transparent)]
    ReadSectionOpen(#[from] ReadSectionOpen),
}

/// The reason why an operation on endpoints, readers or domains failed. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum IommuError {
    /// The endpoint does not exist.
    #[error("endpoint {0} does not exist")]
    NoEndpoint(RequesterId),
    /// The endpoint already exists.
    #[error("endpoint {0} already exists")]
    EndpointExists(RequesterId),
    /// The unit has its maximum number of endpoints.
    #[error("cannot add endpoint {0}: the unit has its maximum number of endpoints")]
    TooManyEndpoints(RequesterId),
    /// The endpoint has its maximum number of readers.
    #[error("cannot add a reader of endpoint {0}: it has its maximum number of readers")]
    TooManyReaders(RequesterId),
    /// The domain does not exist.
    #[error("domain {0} does not exist")]
    NoDomain(DomainId),
    /// The domain already exists.
    #[error("domain {0} already exists")]
    DomainExists(DomainId),
    /// The unit has its maximum number of domains.
    #[error("cannot add domain {0}: the unit has its maximum number of domains")]
    TooManyDomains(DomainId),
    /// The process has no memory for the maximum number of tables of a domain.
    #[error("cannot add domain {0}: out of memory for its tables")]
    NoMemory(DomainId),
    /// An endpoint is attached to the domain.
    #[error("cannot remove domain {0}: an endpoint is attached to it")]
    DomainInUse(DomainId),
    /// The calling thread has a read section open.
    #[error(transparent)]
    ReadSectionOpen(#[from] ReadSectionOpen),
}
