//! The port to physical memory: how tables and rings are read and written.

use core::fmt;
use core::ops::Deref;
use core::sync::atomic::AtomicU64;

use crate::PhysAddr;

/// 64-bit words in one 4 KiB table.
pub const TABLE_WORDS: usize = 512;

/// Memory that holds tables and rings, kept mapped by the embedder for as long as the value lives.
///
/// Entries are shared with hardware, so every word is an atomic. Byte order is the host's, which
/// must be little-endian as the hardware formats are. Guest memory that may vanish is not reached
/// through this port but through `softiommu`'s pins.
pub trait PhysMemory {
    /// The word at `at`, which is 8-byte aligned.
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError>;

    /// The 512 words of the table page at `at`, which is 4 KiB aligned.
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError>;

    /// The `count` words from `at`, which is 8-byte aligned.
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError>;

    /// Writes the cache lines of the `bytes` bytes from `at` back to memory, so that a walker that
    /// does not snoop the processor's caches will see them after the next [`drain`](Self::drain).
    /// Lines outside memory are ignored: they cannot have been written.
    fn write_back(&self, at: PhysAddr, bytes: u64);

    /// Orders all write-backs so far before everything that follows.
    fn drain(&self);

    /// A hint that the cache line at `at`, which may lie outside memory, is about to be changed: a
    /// line that was written back may have to be fetched from memory again.
    #[inline]
    fn prefetch(&self, _at: PhysAddr) {}
}

/// Whatever leads to memory is memory: references, `Rc`, `Arc`, `Box`.
impl<P: Deref<Target: PhysMemory>> PhysMemory for P {
    #[inline]
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        (**self).word(at)
    }

    #[inline]
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        (**self).table(at)
    }

    #[inline]
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        (**self).words(at, count)
    }

    #[inline]
    fn write_back(&self, at: PhysAddr, bytes: u64) {
        (**self).write_back(at, bytes);
    }

    #[inline]
    fn drain(&self) {
        (**self).drain();
    }

    #[inline]
    fn prefetch(&self, at: PhysAddr) {
        (**self).prefetch(at);
    }
}

/// Why memory could not be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryError {
    /// Some of the `words` words from `at` lie outside memory.
    Outside {
        /// First byte asked for.
        at: PhysAddr,
        /// Number of 64-bit words asked for.
        words: u64,
    },
    /// `at` is not aligned for the object asked for.
    Misaligned {
        /// The address asked for.
        at: PhysAddr,
    },
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside { at, words } => write!(f, "{words} words at {at} lie outside memory"),
            Self::Misaligned { at } => write!(f, "{at} is misaligned"),
        }
    }
}

impl core::error::Error for MemoryError {}
