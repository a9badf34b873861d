//! Errors of mapping and attachment changes. A [`Fault`](ringfence_types::Fault) reports errors of
//! a device.

use std::error::Error;
use std::fmt;

use ringfence_types::{DomainId, Iova, IovaRange, PhysAddr, RequesterId};

/// The calling thread has a read section open ([`ReadSection`](crate::ReadSection)), of this or
/// another unit. A change of mappings would wait for itself, or for a thread that waits for it.
/// Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReadSectionOpen;

impl fmt::Display for ReadSectionOpen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this thread holds a read section open and would wait for itself")
    }
}

impl Error for ReadSectionOpen {}

/// Error of a map. The domain is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MapError {
    /// Id of the domain.
    pub domain: DomainId,
    /// The requested range.
    pub range: IovaRange,
    /// Reason of the error.
    pub reason: MapReason,
}

/// Reason why a map failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MapReason {
    /// The range does not consist of whole 4 KiB pages.
    NotPages,
    /// The physical address is not page-aligned, or the physical range exceeds 2^64 - 1.
    BadMemory {
        /// Start of the physical range.
        at: PhysAddr,
    },
    /// Part of the range lies beyond the table's width.
    BeyondWidth,
    /// A page of the range is already mapped.
    Mapped {
        /// Address of the first such page.
        iova: Iova,
    },
    /// The mapping needs more tables than the domain may have
    /// ([`SoftIommuLimits::tables`](crate::SoftIommuLimits::tables)).
    OutOfTables,
    /// The calling thread has a read section open, see [`ReadSectionOpen`].
    ReadSectionOpen,
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} not mapped in domain {}: ", self.range, self.domain)?;
        match self.reason {
            MapReason::NotPages => f.write_str("not whole pages"),
            MapReason::BadMemory { at } => write!(f, "no whole pages at {at}"),
            MapReason::BeyondWidth => f.write_str("beyond the width of the table"),
            MapReason::Mapped { iova } => write!(f, "{iova} is mapped already"),
            MapReason::OutOfTables => f.write_str("no more tables for this domain"),
            MapReason::ReadSectionOpen => ReadSectionOpen.fmt(f),
        }
    }
}

impl Error for MapError {}

/// Error of an unmap. The domain is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnmapError {
    /// The range does not consist of whole 4 KiB pages.
    NotPages {
        /// Id of the domain.
        domain: DomainId,
        /// The requested range.
        range: IovaRange,
    },
    /// The calling thread has a read section open.
    ReadSectionOpen(ReadSectionOpen),
}

impl fmt::Display for UnmapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotPages { domain, range } => {
                write!(
                    f,
                    "{range} not unmapped in domain {domain}: not whole pages"
                )
            }
            Self::ReadSectionOpen(held) => held.fmt(f),
        }
    }
}

impl Error for UnmapError {}

impl From<ReadSectionOpen> for UnmapError {
    fn from(held: ReadSectionOpen) -> Self {
        Self::ReadSectionOpen(held)
    }
}

/// The reason why an operation on endpoints, readers or domains failed. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IommuError {
    /// The endpoint does not exist.
    NoEndpoint(RequesterId),
    /// The endpoint already exists.
    EndpointExists(RequesterId),
    /// The unit has its maximum number of endpoints.
    TooManyEndpoints(RequesterId),
    /// The endpoint has its maximum number of readers.
    TooManyReaders(RequesterId),
    /// The domain does not exist.
    NoDomain(DomainId),
    /// The domain already exists.
    DomainExists(DomainId),
    /// The unit has its maximum number of domains.
    TooManyDomains(DomainId),
    /// The process has no memory for the maximum number of tables of a domain.
    NoMemory(DomainId),
    /// An endpoint is attached to the domain.
    DomainInUse(DomainId),
    /// The calling thread has a read section open.
    ReadSectionOpen(ReadSectionOpen),
}

impl fmt::Display for IommuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoEndpoint(device) => write!(f, "no endpoint {device}"),
            Self::EndpointExists(device) => write!(f, "there is an endpoint {device} already"),
            Self::TooManyEndpoints(device) => write!(f, "no room for endpoint {device}"),
            Self::TooManyReaders(device) => write!(f, "no room for a reader of {device}"),
            Self::NoDomain(domain) => write!(f, "no domain {domain}"),
            Self::DomainExists(domain) => write!(f, "there is a domain {domain} already"),
            Self::TooManyDomains(domain) => write!(f, "no room for domain {domain}"),
            Self::NoMemory(domain) => write!(f, "no memory for the tables of domain {domain}"),
            Self::DomainInUse(domain) => write!(f, "an endpoint is attached to domain {domain}"),
            Self::ReadSectionOpen(held) => held.fmt(f),
        }
    }
}

impl Error for IommuError {}

impl From<ReadSectionOpen> for IommuError {
    fn from(held: ReadSectionOpen) -> Self {
        Self::ReadSectionOpen(held)
    }
}
