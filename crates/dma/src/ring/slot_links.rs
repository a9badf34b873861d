//! The slots of one scatterlist.
//!
//! Each piece of a list takes the next slot like any other buffer: a list need not be in
//! consecutive slots, so it never waits for a hole of its size and may pass the end of the ring.
//! The driver holds the first slot; from there the list is chained here.

use alloc::vec::Vec;

/// Not the first slot of its list: it is not unmapped by itself.
const INNER: u32 = 1 << 31;

/// For each slot 0 if nothing follows it, else 1 + the slot that does, and [`INNER`].
#[derive(Debug, Default)]
pub(super) struct SlotLinks(Vec<u32>);

impl SlotLinks {
    /// Makes room for links between the first `slots` slots. Rings that never see a list keep none.
    pub(super) fn reserve(&mut self, slots: u32) {
        if self.0.is_empty() {
            self.0.resize(slots as usize, 0);
        }
    }

    /// Whether there has never been a list.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `next` follows `slot` in a list.
    pub(super) fn link(&mut self, slot: u32, next: u32) {
        if let Some(link) = self.0.get_mut(slot as usize) {
            *link = (*link & INNER) | next.wrapping_add(1);
        }
        if let Some(link) = self.0.get_mut(next as usize) {
            *link = INNER;
        }
    }

    /// Whether `slot` is part of a list of several slots.
    #[inline]
    pub(super) fn is_linked(&self, slot: u32) -> bool {
        self.0.get(slot as usize).is_some_and(|link| *link != 0)
    }

    /// Whether `slot` is part of a list that begins elsewhere.
    pub(super) fn is_inner(&self, slot: u32) -> bool {
        self.0
            .get(slot as usize)
            .is_some_and(|link| link & INNER != 0)
    }

    /// What follows `slot`.
    #[inline]
    pub(super) fn next(&self, slot: u32) -> Option<u32> {
        (self.0.get(slot as usize)? & !INNER).checked_sub(1)
    }

    /// What follows `slot`, which leaves its list.
    #[inline]
    pub(super) fn unlink(&mut self, slot: u32) -> Option<u32> {
        let next = self.next(slot);
        if let Some(link) = self.0.get_mut(slot as usize) {
            *link = 0;
        }
        next
    }
}
