//! Errors of a network adapter's driver.

use core::fmt;

use ringfence_types::PhysAddr;

use super::device::QueueDir;
use crate::Unreachable;
use crate::api::ApiError;
use crate::buffer::PoolError;
use crate::ring::{CompletionError, MalformedCompletion};

/// Reason why a driver's call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NicError {
    /// The mapping layer failed.
    Api(ApiError),
    /// The CPU could not access its own memory.
    Memory(Unreachable),
    /// The device wrote an invalid completion. Its ring stops until the port is closed.
    Device(MalformedCompletion),
    /// The port has no such queue.
    NoSuchQueue {
        /// Direction of the queue.
        lane: QueueDir,
        /// Index of the queue.
        index: u16,
    },
    /// A frame is empty or too long for the link.
    FrameLength {
        /// Length of the frame in bytes.
        bytes: usize,
    },
    /// The memory has no room for the port's buffers.
    Pool(PoolError),
    /// The layer has fewer entries than the number of buffers to keep mapped.
    NoEntries,
    /// Buffers were not returned before the port was closed.
    Lost {
        /// Number of buffers.
        buffers: usize,
    },
    /// The layer returned a buffer that does not belong to this driver.
    ForeignBuffer {
        /// Address of the buffer's first byte.
        at: PhysAddr,
    },
}

impl fmt::Display for NicError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Api(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::Device(lie) => lie.fmt(f),
            Self::NoSuchQueue { lane, index } => write!(f, "no {lane:?} queue {index}"),
            Self::FrameLength { bytes } => write!(f, "a frame of {bytes} bytes"),
            Self::Pool(error) => error.fmt(f),
            Self::NoEntries => f.write_str("the ring has too few entries"),
            Self::Lost { buffers } => write!(f, "{buffers} buffers never came back"),
            Self::ForeignBuffer { at } => write!(f, "a buffer at {at} that was never given"),
        }
    }
}

impl core::error::Error for NicError {}

impl From<ApiError> for NicError {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl From<Unreachable> for NicError {
    fn from(error: Unreachable) -> Self {
        Self::Memory(error)
    }
}

impl From<CompletionError> for NicError {
    fn from(error: CompletionError) -> Self {
        match error {
            CompletionError::Memory(error) => Self::Memory(error),
            CompletionError::Lie(lie) => Self::Device(lie),
        }
    }
}
