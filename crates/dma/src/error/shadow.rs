//! The reason why a pool has no slot for a buffer.

use core::fmt;

use ringfence_types::MemoryError;

/// The reason why a pool has no slot for a buffer, or for its shadow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShadowError {
    /// All slots of the pool that are large enough are in use, or serve another direction.
    Exhausted {
        /// Pages of the buffer.
        pages: u64,
        /// Pages of the pool.
        pool: u64,
    },
    /// The buffer has more pages than the largest slot.
    TooLong {
        /// Pages of the buffer.
        pages: u64,
        /// Pages of the largest slot.
        slot: u64,
    },
    /// The device's DMA mask does not reach the pool.
    BeyondMask,
    /// A part of the buffer or of the pool lies outside memory.
    Memory(MemoryError),
}

impl fmt::Display for ShadowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exhausted { pages, pool } => write!(
                f,
                "no free slot of {pages} pages in a pool of {pool}: unmap a buffer or use a larger \
                pool"
            ),
            Self::TooLong { pages, slot } => {
                write!(
                    f,
                    "{pages} pages exceed the largest slot of the pool, {slot}"
                )
            }
            Self::BeyondMask => f.write_str("the pool is beyond the device's DMA mask"),
            Self::Memory(error) => error.fmt(f),
        }
    }
}
