//! Disks and their drivers.
//!
//! | file | one concept |
//! |---|---|
//! | `ram_disk.rs` | the medium |
//! | `pages.rs` | the buffers of one request, mapped page by page |
//! | `nvme/` | queue pairs, in order of submission, completed in any order (RI18) |
//! | `ahci/` | 32 slots processed in arbitrary order (RI18: no device for a ring) |
//! | `pseudo_scsi.rs` | Fujita's adapter: maps, transfers nothing, unmaps |

pub mod ahci;
pub mod nvme;
mod pages;
mod pseudo_scsi;
mod ram_disk;

pub use pages::PAGE_BYTES;
pub use pseudo_scsi::PseudoScsi;
pub use ram_disk::{BLOCK_BYTES, OutOfRange, RamDisk};

use core::fmt;

use ringfence_types::Direction;

use crate::api::ApiError;
use crate::ring::{CompletionError, MalformedCompletion};
use crate::{Buffer, Unreachable};

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// From the disk into memory.
    Read,
    /// From memory onto the disk.
    Write,
}

impl Operation {
    /// The direction of its mappings.
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
    /// What is done.
    pub operation: Operation,
    /// First block.
    pub block: u64,
    /// Bytes in all, whole blocks.
    pub bytes: u32,
    /// A page each; all but the last one are used whole.
    pub buffers: Vec<Buffer>,
}

/// A request that is done, with its buffers.
#[derive(Debug)]
pub struct CompletedIo {
    /// What `submit` returned.
    pub tag: u16,
    /// What was done.
    pub operation: Operation,
    /// Whether the disk says that it succeeded.
    pub succeeded: bool,
    /// The buffers of the request, in order.
    pub buffers: Vec<Buffer>,
}

/// A request that was not submitted: nothing of it is mapped.
#[derive(Debug)]
pub struct RejectedIo {
    /// Its buffers, as far as the layer has handed them up.
    pub buffers: Vec<Buffer>,
    /// Why.
    pub error: BlockError,
}

/// Why a driver's call did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockError {
    /// The mapping layer failed.
    Api(ApiError),
    /// The processor could not reach its own memory.
    Memory(Unreachable),
    /// The device lied.
    Device(MalformedCompletion),
    /// All tags are in use, or the layer has no entry free: complete something, and try again.
    Full,
    /// No whole blocks, more than a command can name, or not what the buffers hold.
    Size {
        /// Bytes asked for.
        bytes: u32,
        /// Pages given.
        pages: usize,
    },
    /// There are too few buffers.
    TooFewBuffers,
}

impl fmt::Display for BlockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Api(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::Device(lie) => lie.fmt(f),
            Self::Full => f.write_str("no room for another request now"),
            Self::Size { bytes, pages } => {
                write!(f, "a request of {bytes} bytes with {pages} pages")
            }
            Self::TooFewBuffers => f.write_str("too few buffers"),
        }
    }
}

impl core::error::Error for BlockError {}

impl From<ApiError> for BlockError {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl From<Unreachable> for BlockError {
    fn from(error: Unreachable) -> Self {
        Self::Memory(error)
    }
}

impl From<CompletionError> for BlockError {
    fn from(error: CompletionError) -> Self {
        match error {
            CompletionError::Memory(error) => Self::Memory(error),
            CompletionError::Lie(lie) => Self::Device(lie),
        }
    }
}
