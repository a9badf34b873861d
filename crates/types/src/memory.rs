//! The port to the physical memory that holds tables and rings.

use core::fmt;
use core::ops::Deref;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::PhysAddr;

/// Number of 64-bit words in a 4 KiB table.
pub const TABLE_WORDS: usize = 512;

/// Memory that holds tables and rings. The embedder keeps it mapped for the life of the value.
///
/// The CPU shares entries with hardware, so every word is atomic. Words are in host byte order. The
/// host must be little-endian, because the hardware formats are. Access guest memory that may be
/// unmapped through `softiommu`'s pins, not through this port.
pub trait PhysMemory {
    /// Returns the word at `at`. `at` must be 8-byte aligned.
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError>;

    /// Returns the 512 words of the table page at `at`. `at` must be 4 KiB aligned.
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError>;

    /// Returns the `count` words from `at`. `at` must be 8-byte aligned.
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError>;

    /// Copies `bytes` bytes between addresses that have the same offset in their words. Reads each
    /// byte once, and changes no byte beside the target. Other CPUs and devices may access all
    /// bytes meanwhile; the order of the stores is not defined. If the ranges overlap, the result
    /// is not specified.
    ///
    /// # Errors
    /// A byte lies outside memory, or the offsets differ. Nothing was copied.
    #[inline]
    fn copy_bytes(&self, from: PhysAddr, to: PhysAddr, bytes: u64) -> Result<(), MemoryError> {
        copy_by_words(self, from, to, bytes)
    }

    /// Writes the cache lines of the `bytes` bytes from `at` back to memory. A walker that does not
    /// snoop CPU caches sees them after the next [`drain`](Self::drain). Lines outside memory are
    /// ignored: the CPU cannot have written them.
    fn write_back(&self, at: PhysAddr, bytes: u64);

    /// Orders all previous write-backs before every later store. Loads may pass it.
    fn drain(&self);

    /// Hints that the CPU will soon write the cache line at `at`. A line that was written back may
    /// have to be fetched from memory again. `at` may lie outside memory.
    #[inline]
    fn prefetch(&self, _at: PhysAddr) {}
}

/// Pointers to memory implement the port too: references, `Rc`, `Arc`, `Box`.
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
    fn copy_bytes(&self, from: PhysAddr, to: PhysAddr, bytes: u64) -> Result<(), MemoryError> {
        (**self).copy_bytes(from, to, bytes)
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

/// Returns true if all `words` are zero.
///
/// The function is not generic, so builds of tests optimise it with this crate: the root of a flat
/// table has a million words.
pub fn is_zeroed(words: &[AtomicU64]) -> bool {
    words.iter().all(|word| word.load(Ordering::Relaxed) == 0)
}

/// Copies bytes word by word. The first and the last word keep their other bytes.
fn copy_by_words<M: PhysMemory + ?Sized>(
    memory: &M,
    from: PhysAddr,
    to: PhysAddr,
    bytes: u64,
) -> Result<(), MemoryError> {
    const WORD: u64 = 8;
    let lead = from.offset_in(WORD);
    if lead != to.offset_in(WORD) {
        return Err(MemoryError::Misaligned { at: to });
    }
    let end = lead.saturating_add(bytes);
    let words = |at: PhysAddr| {
        let words = end.div_ceil(WORD);
        let count = usize::try_from(words).map_err(|_| MemoryError::Outside { at, words })?;
        memory.words(at.align_down(WORD), count)
    };
    if bytes == 0 {
        return Ok(());
    }
    let mut first = 0;
    for (source, target) in words(from)?.iter().zip(words(to)?) {
        // The bytes of this word from `skip` to `until`.
        let (skip, until) = (
            lead.saturating_sub(first),
            end.saturating_sub(first).min(WORD),
        );
        first = first.saturating_add(WORD);
        let value = source.load(Ordering::Relaxed);
        if skip == 0 && until == WORD {
            target.store(value, Ordering::Relaxed);
            continue;
        }
        let mask = u64::MAX << (skip * 8) & u64::MAX >> ((WORD - until) * 8);
        let merge = |old: u64| Some(old & !mask | value & mask);
        let _ = target.fetch_update(Ordering::Relaxed, Ordering::Relaxed, merge);
    }
    Ok(())
}

/// The reason why memory could not be accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryError {
    /// Some of the `words` words from `at` lie outside memory.
    Outside {
        /// First byte of the requested range.
        at: PhysAddr,
        /// Number of 64-bit words requested.
        words: u64,
    },
    /// `at` is not aligned for the requested object.
    Misaligned {
        /// The requested address.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_zeroed_if_none_has_a_bit() {
        let words = [const { AtomicU64::new(0) }; 3];
        assert!(is_zeroed(&words) && is_zeroed(&[]));
        for word in &words {
            word.store(1 << 63, Ordering::Relaxed);
            assert!(!is_zeroed(&words));
            word.store(0, Ordering::Relaxed);
        }
    }
}
