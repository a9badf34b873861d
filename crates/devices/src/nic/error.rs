//! Errors of a network adapter's driver.

use ringfence_types::PhysAddr;

use super::device::QueueDir;
use crate::Unreachable;
use crate::api::ApiError;
use crate::buffer::PoolError;
use crate::ring::{CompletionError, MalformedCompletion};

/// Reason why a driver's call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NicError {
    /// The mapping layer failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The CPU could not access its own memory.
    #[error(transparent)]
    Memory(#[from] Unreachable),
    /// The device wrote an invalid completion. Its ring stops until the port is closed.
    #[error(transparent)]
    Device(MalformedCompletion),
    /// The port has no such queue.
    #[error("the port has no {dir:?} queue {index}")]
    NoSuchQueue {
        /// Direction of the queue.
        dir: QueueDir,
        /// Index of the queue.
        index: u16,
    },
    /// A frame is empty or too long for the link.
    #[error("the link carries no frame of {bytes} bytes")]
    FrameLength {
        /// Length of the frame in bytes.
        bytes: usize,
    },
    /// The memory has no room for the port's buffers.
    #[error(transparent)]
    Pool(PoolError),
    /// The layer has fewer entries than the number of buffers to keep mapped.
    #[error("the ring has fewer entries than buffers to keep mapped")]
    NoEntries,
    /// Buffers were not returned before the port was closed.
    #[error("{buffers} buffers were not returned before the port closed")]
    Lost {
        /// Number of buffers.
        buffers: usize,
    },
    /// The layer returned a buffer that does not belong to this driver.
    #[error("the layer returned a buffer at {at} that the driver does not own")]
    ForeignBuffer {
        /// Address of the buffer's first byte.
        at: PhysAddr,
    },
}

impl From<CompletionError> for NicError {
    fn from(error: CompletionError) -> Self {
        match error {
            CompletionError::Memory(error) => Self::Memory(error),
            CompletionError::Malformed(error) => Self::Device(error),
        }
    }
}
