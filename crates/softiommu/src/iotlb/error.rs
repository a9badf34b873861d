//! Why a message was not followed.

use std::error::Error;
use std::fmt;

use ringfence_types::{Fault, Iova, IovaRange, PhysAddr};

use crate::error::{IommuError, MapError, ReadSectionOpen};

/// Bytes that are no IOTLB message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MessageError {
    /// There is no such message.
    Kind(u8),
    /// There are no such permissions.
    Permissions(u8),
    /// An update of no bytes, or past 2^64 - 1.
    Range {
        /// Where it begins.
        iova: Iova,
        /// Its size.
        bytes: u64,
    },
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "no IOTLB message has type {kind}"),
            Self::Permissions(bits) => write!(f, "no access has permissions {bits}"),
            Self::Range { iova, bytes } => write!(f, "an update of {bytes} bytes at {iova}"),
        }
    }
}

impl Error for MessageError {}

/// Bytes that are no frame that is expected here. What follows them cannot be understood either.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FrameError {
    /// Another version of the protocol.
    Version(u32),
    /// A payload of another size than the request has.
    Length(u32),
    /// Something else where a reply should be.
    NoReply,
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(f, "vhost-user version {version}"),
            Self::Length(bytes) => write!(f, "a payload of {bytes} bytes"),
            Self::NoReply => f.write_str("no reply to an IOTLB message"),
        }
    }
}

impl Error for FrameError {}

/// Regions that the front-end cannot have shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegionError {
    /// More than a front-end may share.
    TooMany {
        /// How many.
        given: usize,
        /// How many there may be.
        most: usize,
    },
    /// Empty, or past 2^64 - 1 in one of its address spaces.
    Wraps {
        /// Where it begins in the front-end.
        user: u64,
    },
    /// Two share an address of the front-end.
    Overlap {
        /// The first one that they share.
        user: u64,
    },
}

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany { given, most } => write!(f, "{given} regions, at most {most}"),
            Self::Wraps { user } => write!(f, "the region at {user:#x} wraps"),
            Self::Overlap { user } => write!(f, "two regions have {user:#x}"),
        }
    }
}

impl Error for RegionError {}

/// Why a message of the front-end, or a miss, was not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IotlbError {
    /// A message that only a back-end sends.
    NotForUs,
    /// An update of memory that the front-end has not shared, or not as one region.
    NotShared {
        /// What was to be mapped.
        range: IovaRange,
        /// To what.
        user: u64,
    },
    /// An update without a whole page, or whose memory is aligned otherwise.
    NoPage {
        /// What was to be mapped.
        range: IovaRange,
        /// To what.
        memory: PhysAddr,
    },
    /// The table does not take it.
    Map(MapError),
    /// A fault that no front-end can mend.
    NotAMiss(Fault),
    /// As many misses are under way as there may be.
    TooManyMisses,
    /// No such miss is under way.
    NoMiss,
    /// The unit.
    Unit(IommuError),
    /// See [`ReadSectionOpen`].
    ReadSectionOpen(ReadSectionOpen),
}

impl fmt::Display for IotlbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotForUs => f.write_str("a message that only back-ends send"),
            Self::NotShared { range, user } => {
                write!(f, "{range} is to be {user:#x}, which is not shared")
            }
            Self::NoPage { range, memory } => write!(f, "no whole page of {range} is at {memory}"),
            Self::Map(error) => error.fmt(f),
            Self::NotAMiss(fault) => write!(f, "no miss: {fault}"),
            Self::TooManyMisses => f.write_str("too many misses under way"),
            Self::NoMiss => f.write_str("no such miss is under way"),
            Self::Unit(error) => error.fmt(f),
            Self::ReadSectionOpen(held) => held.fmt(f),
        }
    }
}

impl Error for IotlbError {}

impl From<IommuError> for IotlbError {
    fn from(error: IommuError) -> Self {
        match error {
            IommuError::ReadSectionOpen(held) => Self::ReadSectionOpen(held),
            other => Self::Unit(other),
        }
    }
}

impl From<ReadSectionOpen> for IotlbError {
    fn from(held: ReadSectionOpen) -> Self {
        Self::ReadSectionOpen(held)
    }
}
