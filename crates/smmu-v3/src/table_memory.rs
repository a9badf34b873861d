//! Memory of tables and queues, as the unit sees it.

use core::sync::atomic::Ordering;

use ringfence_pgtable::Coherency;
use ringfence_types::{FrameSource, PageSize, PhysAddr, PhysMemory, PhysRange};

use crate::error::UnitError;

/// Bytes of a stream table entry and of a context descriptor.
pub(crate) const ENTRY_BYTES: u64 = 64;

/// Memory, and whether the unit's reads of it snoop CPU caches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableMemory<'a, M> {
    pub(crate) memory: &'a M,
    pub(crate) coherency: Coherency,
    /// Bits of a physical address of the unit.
    pub(crate) address_bits: u32,
}

impl<M: PhysMemory> TableMemory<'_, M> {
    /// Allocates a zeroed frame that the unit sees as such.
    pub(crate) fn frame<S: FrameSource + ?Sized>(&self, frames: &S) -> Result<PhysAddr, UnitError> {
        let size = frames.frame_size().bytes();
        if size < PageSize::Size4K.bytes() {
            return Err(UnitError::FrameSize);
        }
        let frame = frames.alloc_zeroed()?;
        if !self.holds(frame, size) {
            frames.free(frame);
            return Err(UnitError::Memory);
        }
        self.written(frame, size);
        Ok(frame)
    }

    /// Clears a range.
    pub(crate) fn clear(&self, range: PhysRange) -> Result<(), UnitError> {
        if !self.holds(range.start(), range.bytes()) {
            return Err(UnitError::Memory);
        }
        let count = usize::try_from(range.bytes() / 8).map_err(|_| UnitError::Memory)?;
        let words = self.memory.words(range.start(), count);
        for word in words.map_err(|_| UnitError::Memory)? {
            word.store(0, Ordering::Relaxed);
        }
        self.written(range.start(), range.bytes());
        Ok(())
    }

    /// Returns true if memory holds the bytes and the unit can address them.
    fn holds(&self, at: PhysAddr, bytes: u64) -> bool {
        let last = at.get().checked_add(bytes.saturating_sub(1));
        let reached = last.is_some_and(|last| last.checked_shr(self.address_bits) == Some(0));
        let count = usize::try_from(bytes / 8);
        reached && count.is_ok_and(|count| self.memory.words(at, count).is_ok())
    }

    /// Stores a word after all earlier stores.
    pub(crate) fn store(&self, at: PhysAddr, word: u64) -> Result<(), UnitError> {
        let target = self.memory.word(at).map_err(|_| UnitError::Memory)?;
        target.store(word, Ordering::Release);
        Ok(())
    }

    /// Stores consecutive words in ascending order.
    pub(crate) fn store_all(&self, at: PhysAddr, words: &[u64]) -> Result<(), UnitError> {
        let mut field = at;
        for word in words {
            self.store(field, *word)?;
            field = field.wrapping_add(8);
        }
        self.written(at, (words.len() as u64).saturating_mul(8));
        Ok(())
    }

    /// Loads a word before all later loads.
    pub(crate) fn load(&self, at: PhysAddr) -> Result<u64, UnitError> {
        let source = self.memory.word(at).map_err(|_| UnitError::Memory)?;
        Ok(source.load(Ordering::Acquire))
    }

    /// Writes `bytes` bytes back if the unit does not snoop, and waits.
    fn written(&self, at: PhysAddr, bytes: u64) {
        if self.coherency == Coherency::NonCoherent {
            self.memory.write_back(at, bytes);
            self.memory.drain();
        }
    }
}
