//! Per-thread cache of the upper table levels, for a reader or the writer: maps parts of the
//! address space to leaf tables.
//!
//! A full walk takes four dependent loads; with a cached link it takes one. The cache never holds
//! leaf entries. Maps and unmaps therefore take effect at once, and permissions are always read
//! from the table.
//!
//! A link stays valid until the endpoint's generation changes. Before the writer links a table for
//! another range, it unlinks the table, advances the generation of every attached endpoint, and
//! waits for readers. A reader that sees a new generation, when going online or at a checkpoint,
//! drops all links (decision 0015, "Links"). The writer clears its own cache when it unlinks.

use std::cell::Cell;

use crate::table::TABLE_SHIFT;

/// Number of cached links; each covers 2 MiB of addresses.
const KEPT: usize = 64;

/// Marks an empty slot: no address has this value above `TABLE_SHIFT`.
const NONE: u64 = u64::MAX;

#[derive(Clone, Copy)]
struct CachedLink {
    /// The address bits from `TABLE_SHIFT` upwards.
    addresses: u64,
    /// Index of the first word of the leaf table.
    table: usize,
}

const EMPTY: CachedLink = CachedLink {
    addresses: NONE,
    table: 0,
};

/// Recently followed links, direct-mapped by the lowest bits of `addresses`.
pub(crate) struct WalkCache([Cell<CachedLink>; KEPT]);

impl WalkCache {
    pub(crate) fn new() -> Self {
        Self([const { Cell::new(EMPTY) }; KEPT])
    }

    /// Returns the index of the first word of the leaf table for `iova`, if cached.
    #[inline]
    pub(crate) fn find(&self, iova: u64) -> Option<usize> {
        let link = self.slot(iova).get();
        (link.addresses == iova >> TABLE_SHIFT).then_some(link.table)
    }

    /// Caches that the leaf table for `iova` begins at word `table`.
    #[inline]
    pub(crate) fn keep(&self, iova: u64, table: usize) {
        let addresses = iova >> TABLE_SHIFT;
        self.slot(iova).set(CachedLink { addresses, table });
    }

    /// Drops all links.
    pub(crate) fn clear(&self) {
        self.0.iter().for_each(|link| link.set(EMPTY));
    }

    #[inline]
    fn slot(&self, iova: u64) -> &Cell<CachedLink> {
        // The compiler can prove that the index is in bounds.
        &self.0[(iova >> TABLE_SHIFT) as usize % KEPT]
    }
}
