//! Errors of IOTLB messages.

use std::error::Error;
use std::fmt;

use ringfence_types::{Fault, Iova, IovaRange, PhysAddr};

use crate::error::{IommuError, MapError, ReadSectionOpen};

/// A malformed IOTLB message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MessageError {
    /// Unknown message type.
    Kind(u8),
    /// The permissions are not 1 to 3 (read, write or both).
    Permissions(u8),
    /// An update of zero bytes, or one that exceeds 2^64 - 1.
    Range {
        /// Start of the range.
        iova: Iova,
        /// Length in bytes.
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

/// A malformed or unexpected frame. The bytes after it cannot be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FrameError {
    /// Unsupported protocol version.
    Version(u32),
    /// Payload length that does not match the request.
    Length(u32),
    /// A frame that is not a reply to an IOTLB message.
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

/// An invalid list of regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegionError {
    /// More regions than a front-end may share.
    TooMany {
        /// Number of regions given.
        given: usize,
        /// Maximum number of regions.
        most: usize,
    },
    /// A region is empty, or exceeds 2^64 - 1 in one of its address spaces.
    Wraps {
        /// Start of the region in the front-end's address space.
        user: u64,
    },
    /// Two regions overlap in the front-end's address space.
    Overlap {
        /// First address that both contain.
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

/// Error of a message of the front-end, or of a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IotlbError {
    /// A message type that only a back-end sends.
    NotForUs,
    /// An update to memory that the front-end has not shared as one region.
    NotShared {
        /// IOVA range of the update.
        range: IovaRange,
        /// Address in the front-end's address space.
        user: u64,
    },
    /// An update that contains no whole page, or whose memory has a different page offset.
    NoPage {
        /// IOVA range of the update.
        range: IovaRange,
        /// Physical address of the update.
        memory: PhysAddr,
    },
    /// The page table rejected the mapping.
    Map(MapError),
    /// The fault is not a missing translation, so the front-end cannot resolve it.
    NotAMiss(Fault),
    /// The number of pending misses is at its limit.
    TooManyMisses,
    /// The miss is not pending.
    NoMiss,
    /// Error of the unit.
    Unit(IommuError),
    /// The calling thread has a read section open, see [`ReadSectionOpen`].
    ReadSectionOpen(ReadSectionOpen),
}

impl fmt::Display for IotlbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotForUs => f.write_str("a message that only back-ends send"),
            Self::NotShared { range, user } => {
                write!(
                    f,
                    "update of {range} names {user:#x}, which the front-end has not shared"
                )
            }
            Self::NoPage { range, memory } => {
                write!(f, "update of {range} to {memory} contains no whole page")
            }
            Self::Map(error) => error.fmt(f),
            Self::NotAMiss(fault) => write!(f, "not an IOTLB miss: {fault}"),
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
