//! The slots of one scatterlist.
//!
//! Each piece of a list takes the next slot, like any other buffer. The slots of a list need not be
//! consecutive: a list never waits for a gap of its size, and may wrap around the end of the ring.
//! The driver holds the first slot; this table links it to the others.

use alloc::vec::Vec;

/// Marks a slot that is not the first of its list. It cannot be unmapped on its own.
const INNER: u32 = 1 << 31;

/// Per slot: 0, or the next slot plus 1, combined with [`INNER`].
#[derive(Debug, Default)]
pub(super) struct SlotLinks(Vec<u32>);

impl SlotLinks {
    /// Allocates links for the first `slots` slots. A ring that never maps a list allocates none.
    pub(super) fn reserve(&mut self, slots: u32) {
        if self.0.is_empty() {
            self.0.resize(slots as usize, 0);
        }
    }

    /// Returns true if the ring has never mapped a list.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Makes `next` follow `slot` in a list.
    pub(super) fn link(&mut self, slot: u32, next: u32) {
        if let Some(link) = self.0.get_mut(slot as usize) {
            *link = (*link & INNER) | next.wrapping_add(1);
        }
        if let Some(link) = self.0.get_mut(next as usize) {
            *link = INNER;
        }
    }

    /// Returns true if `slot` is part of a list of several slots.
    #[inline]
    pub(super) fn is_linked(&self, slot: u32) -> bool {
        self.0.get(slot as usize).is_some_and(|link| *link != 0)
    }

    /// Returns true if `slot` is part of a list but not its first slot.
    pub(super) fn is_inner(&self, slot: u32) -> bool {
        self.0
            .get(slot as usize)
            .is_some_and(|link| link & INNER != 0)
    }

    /// Returns the slot after `slot` in its list. `None` if `slot` is the last one.
    #[inline]
    pub(super) fn next(&self, slot: u32) -> Option<u32> {
        (self.0.get(slot as usize)? & !INNER).checked_sub(1)
    }

    /// Removes `slot` from its list and returns the slot after it.
    #[inline]
    pub(super) fn unlink(&mut self, slot: u32) -> Option<u32> {
        let next = self.next(slot);
        if let Some(link) = self.0.get_mut(slot as usize) {
            *link = 0;
        }
        next
    }
}
