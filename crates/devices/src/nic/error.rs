//! What can go wrong for a driver of a network adapter.

use core::fmt;

use ringfence_types::PhysAddr;

use super::device::QueueDir;
use crate::Unreachable;
use crate::api::ApiError;
use crate::buffer::PoolError;
use crate::ring::{CompletionError, MalformedCompletion};

/// Why a driver's call did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NicError {
    /// The mapping layer failed.
    Api(ApiError),
    /// The processor could not reach its own memory.
    Memory(Unreachable),
    /// The device lied. Its ring stands still until the port is closed.
    Device(MalformedCompletion),
    /// The port has no such queue.
    NoSuchQueue {
        /// The lane.
        lane: QueueDir,
        /// The number.
        index: u16,
    },
    /// A frame is empty or longer than the link takes.
    FrameLength {
        /// Its bytes.
        bytes: usize,
    },
    /// There is no room for the port's buffers.
    Pool(PoolError),
    /// The layer has fewer entries than buffers are to stay mapped.
    NoEntries,
    /// Buffers did not come back until the port was closed.
    Lost {
        /// How many.
        buffers: usize,
    },
    /// The layer handed up a buffer that is not this driver's.
    ForeignBuffer {
        /// Its first byte.
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
