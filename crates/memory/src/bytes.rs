//! Byte access for device data.
//!
//! A device may write to any address that a translation gives it, even into a table, while CPUs use
//! the same words as atomics. Byte accesses therefore move whole atomic words, and update the first
//! and last word by compare-and-exchange. No access tears a word or causes a data race, and no
//! unsafe code is needed.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{MemoryError, PhysAddr, PhysMemory};

use crate::Arena;

const WORD: u64 = 8;

impl Arena {
    /// Reads `into.len()` bytes from `at`.
    ///
    /// # Errors
    /// Some byte lies outside memory; nothing was read.
    #[inline]
    pub fn read_bytes(&self, at: PhysAddr, into: &mut [u8]) -> Result<(), MemoryError> {
        let words = self.words_of(at, into.len() as u64)?;
        let skip = (at.get() % WORD) as usize;
        let head = (WORD as usize - skip).min(into.len());
        let (first, rest) = into.split_at_mut(head);
        let mut words = words
            .iter()
            .map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        if !first.is_empty()
            && let Some(word) = words.next()
        {
            first.copy_from_slice(&word[skip..skip + head]);
        }
        for (bytes, word) in rest.chunks_mut(WORD as usize).zip(words) {
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
        Ok(())
    }

    /// Writes `from` to `at`.
    ///
    /// # Errors
    /// Some byte lies outside memory; nothing was written.
    #[inline]
    pub fn write_bytes(&self, at: PhysAddr, from: &[u8]) -> Result<(), MemoryError> {
        let mut words = self.words_of(at, from.len() as u64)?.iter();
        let skip = (at.get() % WORD) as usize;
        let head = (WORD as usize - skip).min(from.len());
        let (first, rest) = from.split_at(head);
        if !first.is_empty()
            && let Some(word) = words.next()
        {
            merge(word, skip, first);
        }
        for (bytes, word) in rest.chunks(WORD as usize).zip(words) {
            match <[u8; 8]>::try_from(bytes) {
                Ok(whole) => word.store(u64::from_le_bytes(whole), Ordering::Relaxed),
                Err(_) => merge(word, 0, bytes),
            }
        }
        Ok(())
    }

    /// Reads the byte at `at`.
    ///
    /// # Errors
    /// The byte lies outside memory.
    #[inline]
    pub fn read_byte(&self, at: PhysAddr) -> Result<u8, MemoryError> {
        let word = self.word(at.align_down(WORD))?.load(Ordering::Relaxed);
        Ok((word >> (8 * at.offset_in(WORD))) as u8)
    }

    /// Returns the words that hold the `bytes` bytes from `at`.
    #[inline]
    fn words_of(&self, at: PhysAddr, bytes: u64) -> Result<&[AtomicU64], MemoryError> {
        let first = at.align_down(WORD);
        let outside = MemoryError::Outside {
            at,
            words: bytes.saturating_add(at.offset_in(WORD)).div_ceil(WORD),
        };
        let Some(end) = at.checked_add(bytes) else {
            return Err(outside);
        };
        let words = (end.get() - first.get()).div_ceil(WORD);
        let words = usize::try_from(words).map_err(|_| outside)?;
        if bytes == 0 {
            return Ok(&[]);
        }
        self.words(first, words).map_err(|_| outside)
    }
}

/// Replaces the bytes of `word` from byte `skip` on by `bytes`, which must fit.
#[inline]
fn merge(word: &AtomicU64, skip: usize, bytes: &[u8]) {
    let mut mask = 0_u64;
    let mut new = 0_u64;
    for (index, byte) in bytes.iter().enumerate() {
        let shift = 8 * (skip + index);
        mask |= 0xff << shift;
        new |= u64::from(*byte) << shift;
    }
    let mut old = word.load(Ordering::Relaxed);
    while let Err(now) = word.compare_exchange_weak(
        old,
        (old & !mask) | new,
        Ordering::Relaxed,
        Ordering::Relaxed,
    ) {
        old = now;
    }
}
