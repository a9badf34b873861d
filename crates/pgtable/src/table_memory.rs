//! The memory of a unit's tables and queues, as the unit sees it.

use core::sync::atomic::Ordering;

use ringfence_types::{FrameSource, PhysAddr, PhysMemory};

use crate::frame_reserve::fresh_frame;
use crate::{Coherency, TableError};

/// Memory in which a driver keeps the tables and queues of a unit. What it wrote is visible to the
/// unit, whether the unit snoops CPU caches or not.
#[derive(Debug, Clone, Copy)]
pub struct TableMemory<'a, M: ?Sized> {
    memory: &'a M,
    coherency: Coherency,
    address_bits: u32,
}

impl<'a, M: ?Sized> TableMemory<'a, M> {
    /// The unit's accesses to `memory` have this coherency with CPU caches, and physical addresses
    /// of `address_bits` bits.
    pub const fn new(memory: &'a M, coherency: Coherency, address_bits: u32) -> Self {
        Self {
            memory,
            coherency,
            address_bits,
        }
    }
}

impl<M: PhysMemory + ?Sized> TableMemory<'_, M> {
    /// Allocates a zeroed frame that the unit sees as such. It has at least 4 KiB.
    ///
    /// # Errors
    /// [`TableError::OutOfFrames`], or [`TableError::Memory`] if the frame lies outside memory or
    /// beyond the unit's addresses.
    pub fn frame<S: FrameSource + ?Sized>(&self, frames: &S) -> Result<PhysAddr, TableError> {
        let size = frames.frame_size();
        let frame = fresh_frame(size, self.coherency, self.memory, frames)?;
        if !self.reaches(frame, size.bytes()) {
            frames.free(frame);
            return Err(TableError::Memory);
        }
        self.coherency.drain(self.memory);
        Ok(frame)
    }

    /// Returns true if memory holds the `bytes` bytes from `at` and the unit can access them.
    pub fn holds(&self, at: PhysAddr, bytes: u64) -> bool {
        let count = usize::try_from(bytes.div_ceil(8));
        let holds = |count| self.memory.words(at, count).is_ok();
        self.reaches(at, bytes) && count.is_ok_and(holds)
    }

    fn reaches(&self, at: PhysAddr, bytes: u64) -> bool {
        let last = at.get().checked_add(bytes.saturating_sub(1));
        let beyond = |last: u64| last.checked_shr(self.address_bits).unwrap_or(0);
        last.is_some_and(|last| beyond(last) == 0)
    }

    /// Loads a word before all later loads.
    ///
    /// # Errors
    /// [`TableError::Memory`].
    pub fn load(&self, at: PhysAddr) -> Result<u64, TableError> {
        let source = self.memory.word(at).map_err(|_| TableError::Memory)?;
        Ok(source.load(Ordering::Acquire))
    }

    /// Stores consecutive words in ascending order, each after all earlier stores.
    ///
    /// # Errors
    /// [`TableError::Memory`]; the words before the missing one are stored.
    pub fn store(&self, at: PhysAddr, words: &[u64]) -> Result<(), TableError> {
        let mut field = at;
        for word in words {
            let target = self.memory.word(field).map_err(|_| TableError::Memory)?;
            target.store(*word, Ordering::Release);
            field = field.wrapping_add(8);
        }
        let bytes = (words.len() as u64).saturating_mul(8);
        self.coherency.write_back(self.memory, at, bytes);
        self.coherency.drain(self.memory);
        Ok(())
    }

    /// Stores an entry whose first word holds the valid bit: the other words first, so that the
    /// unit never sees the bit with fields of an earlier entry.
    ///
    /// # Errors
    /// [`TableError::Memory`]; the first word is unchanged.
    pub fn store_entry(&self, at: PhysAddr, entry: &[u64]) -> Result<(), TableError> {
        let Some((first, rest)) = entry.split_first() else {
            return Ok(());
        };
        self.store(at.wrapping_add(8), rest)?;
        self.store(at, &[*first])
    }
}
