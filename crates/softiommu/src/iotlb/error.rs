//! Errors of IOTLB messages.

use ringfence_types::{Fault, Iova, IovaRange, PhysAddr};

use crate::error::{DomainMapError, IommuError, ReadSectionOpen};

/// A malformed IOTLB message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum MessageError {
    /// Unknown message type.
    #[error("no IOTLB message has type {0}")]
    Kind(u8),
    /// The permissions are not 1 to 3 (read, write or both).
    #[error("invalid permissions {0}")]
    Permissions(u8),
    /// An update of zero bytes, or one that exceeds 2^64 - 1.
    #[error("the {bytes} bytes at {iova} are empty or wrap")]
    Range {
        /// Start of the range.
        iova: Iova,
        /// Length in bytes.
        bytes: u64,
    },
}

/// A malformed or unexpected frame. The bytes after it cannot be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum FrameError {
    /// Unsupported protocol version.
    #[error("unsupported vhost-user version {0}")]
    Version(u32),
    /// Payload length that does not match the request.
    #[error("a payload of {0} bytes does not fit the request")]
    Length(u32),
    /// A frame that is not a reply to an IOTLB message.
    #[error("not a reply to an IOTLB message")]
    NoReply,
}

/// An invalid list of regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RegionError {
    /// More regions than a front-end may share.
    #[error("{count} regions, but the limit is {limit}")]
    TooMany {
        /// Number of regions given.
        count: usize,
        /// Maximum number of regions.
        limit: usize,
    },
    /// A region is empty, or exceeds 2^64 - 1 in one of its address spaces.
    #[error("the region at {user:#x} wraps")]
    Wraps {
        /// Start of the region in the front-end's address space.
        user: u64,
    },
    /// Two regions overlap in the front-end's address space.
    #[error("two regions contain {user:#x}")]
    Overlap {
        /// First address that both contain.
        user: u64,
    },
}

/// Error of a message of the front-end, or of a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum IotlbError {
    /// A message type that only a back-end sends.
    #[error("only a back-end sends this message")]
    NotForUs,
    /// An update to memory that the front-end has not shared as one region.
    #[error("the update of {range} names {user:#x}, which lies outside the shared memory regions")]
    NotShared {
        /// IOVA range of the update.
        range: IovaRange,
        /// Address in the front-end's address space.
        user: u64,
    },
    /// An update that contains no whole page, or whose memory has a different page offset.
    #[error("the update of {range} to {memory} contains no whole page")]
    NoPage {
        /// IOVA range of the update.
        range: IovaRange,
        /// Physical address of the update.
        memory: PhysAddr,
    },
    /// The page table rejected the mapping.
    #[error(transparent)]
    Map(DomainMapError),
    /// The fault is not a missing translation, so the front-end cannot resolve it.
    #[error("the fault is not an IOTLB miss: {0}")]
    NotAMiss(Fault),
    /// The number of pending misses is at its limit.
    #[error("too many outstanding misses")]
    TooManyMisses,
    /// The miss is not pending.
    #[error("the miss is not outstanding")]
    NoMiss,
    /// Error of the unit.
    #[error(transparent)]
    Unit(IommuError),
    /// The calling thread has a read section open, see [`ReadSectionOpen`].
    #[error(transparent)]
    ReadSectionOpen(#[from] ReadSectionOpen),
}

impl From<IommuError> for IotlbError {
    fn from(error: IommuError) -> Self {
        match error {
            IommuError::ReadSectionOpen(held) => Self::ReadSectionOpen(held),
            other => Self::Unit(other),
        }
    }
}
