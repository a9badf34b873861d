//! What can go wrong when mappings are changed. What a device gets wrong is a
//! [`Fault`](ringfence_types::Fault).

use std::error::Error;
use std::fmt;

use ringfence_types::{DomainId, Iova, IovaRange, PhysAddr, RequesterId};

/// The calling thread holds a burst open ([`ReadSection`](crate::ReadSection)), of this unit or any
/// other. It would wait for itself, or for a thread that waits for it. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReadSectionOpen;

impl fmt::Display for ReadSectionOpen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this thread is online as a reader, and would wait for itself")
    }
}

impl Error for ReadSectionOpen {}

/// A mapping that was not made. The domain is as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MapError {
    /// The domain.
    pub domain: DomainId,
    /// What was to be mapped.
    pub range: IovaRange,
    /// Why it was not.
    pub reason: MapReason,
}

/// Why a mapping was not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MapReason {
    /// The range does not consist of whole 4 KiB pages.
    NotPages,
    /// The memory to map to begins inside a page, or passes 2^64 - 1.
    BadMemory {
        /// Where it begins.
        at: PhysAddr,
    },
    /// Part of the range lies beyond the table's width.
    BeyondWidth,
    /// A page is mapped already.
    Mapped {
        /// Its address.
        iova: Iova,
    },
    /// The domain may not have as many tables as the mapping needs
    /// ([`SoftIommuLimits::tables`](crate::SoftIommuLimits::tables)).
    OutOfTables,
    /// See [`ReadSectionOpen`].
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

/// A range that was not unmapped. The domain is as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnmapError {
    /// The range does not consist of whole 4 KiB pages.
    NotPages {
        /// The domain.
        domain: DomainId,
        /// What was to be unmapped.
        range: IovaRange,
    },
    /// See [`ReadSectionOpen`].
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

/// A change of endpoints or domains that was not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IommuError {
    /// There is no such endpoint.
    NoEndpoint(RequesterId),
    /// There is such an endpoint already.
    EndpointExists(RequesterId),
    /// There are as many endpoints as there may be.
    TooManyEndpoints(RequesterId),
    /// The endpoint has as many readers as it may have.
    TooManyReaders(RequesterId),
    /// There is no such domain.
    NoDomain(DomainId),
    /// There is such a domain already.
    DomainExists(DomainId),
    /// There are as many domains as there may be.
    TooManyDomains(DomainId),
    /// The process has no memory for as many tables as the domain may have.
    NoMemory(DomainId),
    /// An endpoint is attached to the domain.
    DomainInUse(DomainId),
    /// See [`ReadSectionOpen`].
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
