//! A copy of the upper levels for one thread, a reader or the writer: which table of the last level
//! translates which part of the address space.
//!
//! A walk is four loads of which each needs the one before; with the last link at hand it is one.
//! Entries of the last level are never kept: what is mapped and unmapped is seen at once, and
//! permissions are read where they stand.
//!
//! A link stays right for as long as its reader is not told otherwise. Tables are linked for
//! another range only after a wait for readers that began when they were unlinked, and the
//! generation of every attached endpoint was advanced before that wait. A reader that finds a new
//! generation, at the beginning of a burst or at a checkpoint, forgets all links (decision 0015,
//! "Links"). The writer forgets its own when it unlinks.

use std::cell::Cell;

use crate::table::TABLE_SHIFT;

/// Links that are kept; each stands for 2 MiB of addresses.
const KEPT: usize = 64;

/// No address has this above `TABLE_SHIFT`.
const NONE: u64 = u64::MAX;

#[derive(Clone, Copy)]
struct CachedLink {
    /// The addresses, without their lowest `TABLE_SHIFT` bits.
    addresses: u64,
    /// Index of the first word of their table.
    table: usize,
}

const EMPTY: CachedLink = CachedLink {
    addresses: NONE,
    table: 0,
};

/// The links that a reader has followed lately, by the lowest bits of their addresses.
pub(crate) struct WalkCache([Cell<CachedLink>; KEPT]);

impl WalkCache {
    pub(crate) fn new() -> Self {
        Self([const { Cell::new(EMPTY) }; KEPT])
    }

    /// The table of the last level for `iova`: index of its first word.
    #[inline]
    pub(crate) fn find(&self, iova: u64) -> Option<usize> {
        let link = self.slot(iova).get();
        (link.addresses == iova >> TABLE_SHIFT).then_some(link.table)
    }

    /// The table of the last level for `iova` begins at word `table`.
    #[inline]
    pub(crate) fn keep(&self, iova: u64, table: usize) {
        let addresses = iova >> TABLE_SHIFT;
        self.slot(iova).set(CachedLink { addresses, table });
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        self.0.iter().for_each(|link| link.set(EMPTY));
    }

    #[inline]
    fn slot(&self, iova: u64) -> &Cell<CachedLink> {
        // The index is below the length by construction, and the compiler sees that.
        &self.0[(iova >> TABLE_SHIFT) as usize % KEPT]
    }
}
