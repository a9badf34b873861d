//! A place in a ring's table for whoever goes through it in order: the next entry, and its address.
//!
//! The address follows from where the entry lies. So a place is one word that changes, and a step
//! in ring order adds to it, where an index would be compared, scaled and looked up.

use core::ops::Range;
use core::slice;

use ringfence_pgtable::{RING_ENTRY_BYTES, RingWords};
use ringfence_types::{Iova, RingIova};

/// Bytes of address for a byte of table, as a shift.
const SHIFT: u32 = RingIova::OFFSET_BITS - RING_ENTRY_BYTES.ilog2();

/// Slots that follow each other, of which the first is next.
#[derive(Debug)]
pub(super) struct Cursor<'m> {
    words: slice::Iter<'m, RingWords>,
    /// What is added to where an entry lies, shifted, for the address of its slot. Modulo 2^64.
    origin: u64,
}

impl<'m> Cursor<'m> {
    /// `slots` of the ring whose slot 0 is at `base`; `None` if it has not got them.
    #[inline]
    pub(super) fn new(
        base: RingIova,
        entries: &'m [RingWords],
        slots: Range<usize>,
    ) -> Option<Self> {
        let first = (entries.as_ptr().addr() as u64) << SHIFT;
        Some(Self {
            words: entries.get(slots)?.iter(),
            origin: base.iova().get().wrapping_sub(first),
        })
    }

    /// The address of the next slot.
    #[inline]
    pub(super) fn at(&self) -> RingIova {
        let place = self.words.as_slice().as_ptr().addr() as u64;
        Iova::new((place << SHIFT).wrapping_add(self.origin)).into()
    }

    /// How many slots are left.
    #[inline]
    pub(super) fn slots(&self) -> usize {
        self.words.len()
    }

    /// How many bytes the next slot's address is below `end`, if that lies in the same slot; else
    /// more than a slot has.
    #[inline]
    pub(super) fn bytes_to(&self, end: RingIova) -> u64 {
        end.iova().get().wrapping_sub(self.at().iova().get())
    }

    /// The next slot's entry.
    #[inline]
    pub(super) fn entry(&self) -> Option<&'m RingWords> {
        self.words.as_slice().first()
    }

    /// Has no slots any more, and stays where it is.
    pub(super) fn stop(&mut self) {
        self.words = self.words.as_slice().get(..0).unwrap_or_default().iter();
    }

    /// Goes on to the slot after it; the entry and address of the one left.
    #[inline]
    pub(super) fn step(&mut self) -> Option<(&'m RingWords, RingIova)> {
        let at = self.at();
        Some((self.words.next()?, at))
    }
}
