//! Disks and their drivers.
//!
//! | file | concept |
//! |---|---|
//! | `ram_disk.rs` | the medium |
//! | `pages.rs` | the buffers of one request, mapped page by page |
//! | `nvme/` | queue pairs, in order of submission, completed in any order |
//! | `ahci/` | 32 slots processed in arbitrary order (a ring does not suit this device) |
//! | `pseudo_scsi.rs` | Fujita's adapter: maps, transfers nothing, unmaps |

pub mod ahci;
pub mod nvme;
mod pages;
mod pseudo_scsi;
mod ram_disk;

pub use pages::PAGE_BYTES;
pub use pseudo_scsi::PseudoScsi;
pub use ram_disk::{BLOCK_BYTES, OutOfRange, RamDisk};

use ringfence_types::Direction;

use crate::api::{ApiError, DeviceRing, MapFailure};
use crate::ring::{CompletionError, MalformedCompletion};
use crate::{Buffer, Unreachable};

/// Type of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Transfers from the disk to memory.
    Read,
    /// Transfers from memory to the disk.
    Write,
}

impl Operation {
    /// Returns the direction of the request's mappings.
    #[inline]
    pub const fn direction(self) -> Direction {
        match self {
            Self::Read => Direction::FromDevice,
            Self::Write => Direction::ToDevice,
        }
    }
}

/// A request to a disk.
#[derive(Debug)]
pub struct DiskRequest {
    /// Read or write.
    pub operation: Operation,
    /// Number of the first block.
    pub block: u64,
    /// Total length in bytes, a multiple of the block size.
    pub bytes: u32,
    /// One page each. All but the last are used completely.
    pub buffers: Vec<Buffer>,
}

/// A completed request with its buffers.
#[derive(Debug)]
pub struct CompletedIo {
    /// Tag that `submit` returned.
    pub tag: u16,
    /// Read or write.
    pub operation: Operation,
    /// True if the disk reported success.
    pub succeeded: bool,
    /// The buffers of the request, in order.
    pub buffers: Vec<Buffer>,
}

/// A request that was not submitted. The device may still reach buffers that the layer has not
/// returned.
#[derive(Debug)]
pub struct RejectedIo {
    /// The buffers that the layer has returned: all, unless `error` is of their unmap.
    pub buffers: Vec<Buffer>,
    /// Reason why the request was not submitted, or the first error of the unmap of its pages.
    pub error: BlockError,
}

impl RejectedIo {
    fn new(buffers: Vec<Buffer>, error: BlockError) -> Self {
        Self { buffers, error }
    }
}

/// Reason why a driver's call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The mapping layer failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The CPU could not access its own memory.
    #[error(transparent)]
    Memory(#[from] Unreachable),
    /// The device wrote an invalid completion.
    #[error(transparent)]
    Device(MalformedCompletion),
    /// All tags are in use, or the layer has no free entry. Try again after a completion.
    #[error("all tags or entries are in use; try again after a completion")]
    Full,
    /// The length is no multiple of the block size, exceeds a command, or does not match the
    /// buffers.
    #[error("{pages} pages cannot hold a request of {bytes} bytes")]
    Size {
        /// Length of the request in bytes.
        bytes: u32,
        /// Number of pages in the request.
        pages: usize,
    },
    /// Too few buffers.
    #[error("the queue needs more buffers")]
    TooFewBuffers,
}

impl BlockError {
    /// Returns the reason why a buffer was not mapped.
    fn of_map(failure: MapFailure, ring: DeviceRing) -> Self {
        match failure {
            MapFailure::Busy => Self::Full,
            MapFailure::NoSuchRing => ApiError::NoSuchRing(ring).into(),
            MapFailure::Failed(error) => ApiError::Map(error).into(),
        }
    }
}

impl From<CompletionError> for BlockError {
    fn from(error: CompletionError) -> Self {
        match error {
            CompletionError::Memory(error) => Self::Memory(error),
            CompletionError::Malformed(error) => Self::Device(error),
        }
    }
}
