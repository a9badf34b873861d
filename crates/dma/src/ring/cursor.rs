//! A position in a ring's table that advances in ring order: the next entry and its address.
//!
//! The I/O virtual address follows from the memory address of the entry. The position is therefore
//! one changing word, and a step is one addition. An index would need a comparison, a
//! multiplication and a load.

use core::ops::Range;
use core::slice;

use ringfence_pgtable::{RING_ENTRY_BYTES, RingWords};
use ringfence_types::{Iova, RingIova};

/// Binary logarithm of the bytes of I/O virtual address per byte of table.
const SHIFT: u32 = RingIova::OFFSET_BITS - RING_ENTRY_BYTES.ilog2();

/// A run of consecutive slots; the first one is next.
#[derive(Debug)]
pub(super) struct Cursor<'m> {
    words: slice::Iter<'m, RingWords>,
    /// The offset from an entry's shifted memory address to its slot's address, modulo 2^64.
    origin: u64,
}

impl<'m> Cursor<'m> {
    /// Creates a cursor over `slots` of the ring whose slot 0 is at `base`. `None` if `slots`
    /// exceeds the ring.
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

    /// Returns the address of the next slot.
    #[inline]
    pub(super) fn at(&self) -> RingIova {
        let address = self.words.as_slice().as_ptr().addr() as u64;
        Iova::new((address << SHIFT).wrapping_add(self.origin)).into()
    }

    /// Returns the number of remaining slots.
    #[inline]
    pub(super) fn slots(&self) -> usize {
        self.words.len()
    }

    /// Returns the bytes from the next slot's address to `end`. Larger than any offset if `end` is
    /// not in that slot.
    #[inline]
    pub(super) fn bytes_to(&self, end: RingIova) -> u64 {
        end.iova().get().wrapping_sub(self.at().iova().get())
    }

    /// Returns the next slot's entry. `None` if no slot remains.
    #[inline]
    pub(super) fn entry(&self) -> Option<&'m RingWords> {
        self.words.as_slice().first()
    }

    /// Drops the remaining slots; the position stays.
    pub(super) fn stop(&mut self) {
        self.words = self.words.as_slice().get(..0).unwrap_or_default().iter();
    }

    /// Advances by one slot. Returns the entry and the address of the slot passed.
    #[inline]
    pub(super) fn step(&mut self) -> Option<(&'m RingWords, RingIova)> {
        let at = self.at();
        Some((self.words.next()?, at))
    }
}
