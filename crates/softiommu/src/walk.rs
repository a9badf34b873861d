//! Reader's walk: from an address to its page's entry, and from a range to its memory.

use ringfence_types::{Access, FaultReason, Iova, IovaRange, PageSize, Permissions, PhysRange};

use crate::phys_ranges::PhysRanges;
use crate::sync::{AtomicU64, INDEX_BITS, Ordering};
use crate::table::{GRANULE_SHIFT, Leaf, Table, index};
use crate::walk_cache::WalkCache;

const PAGE: u64 = PageSize::Size4K.bytes();

/// The first address that was denied, the access and the reason.
pub(crate) type Denied = (Iova, Access, FaultReason);

/// Fast path for most accesses. Translates `range` if it lies in one page, its table is cached in
/// `links`, and its entry in `words` allows `required`. [`Table::translate`] handles all other
/// cases, including faults.
///
/// Requires a guard: see [`Table::table_of`].
#[inline]
pub(crate) fn translate_cached(
    words: &[AtomicU64],
    links: &WalkCache,
    range: &IovaRange,
    required: Permissions,
) -> Option<PhysRange> {
    let (start, last) = (range.start(), range.last());
    if (start.get() ^ last.get()) >> GRANULE_SHIFT != 0 {
        return None;
    }
    let table = links.find(start.get())?;
    let leaf = Leaf::read(words.get(table | index(start.get(), GRANULE_SHIFT))?);
    if leaf.allows(required) {
        within(leaf, start, last)
    } else {
        None
    }
}

/// Returns the physical range of `start..=last` in the page of `leaf`. Both addresses must lie in
/// one page; the result is then never `None`.
#[inline]
fn within(leaf: Leaf, start: Iova, last: Iova) -> Option<PhysRange> {
    let [start, last] = [start, last].map(|at| leaf.page().wrapping_add(at.offset_in(PAGE)));
    PhysRange::inclusive(start, last)
}

impl Table {
    /// Translates `range` if every page of it is mapped with `required`. Never returns a partial
    /// result.
    ///
    /// Reads each entry once, so the entry that is checked is the entry that is used.
    pub(crate) fn translate(
        &self,
        links: &WalkCache,
        range: IovaRange,
        required: Permissions,
    ) -> Result<PhysRanges, Denied> {
        if !self.width().holds(&range) {
            return Err(self.beyond_width(range.start(), required));
        }
        let mut pieces: Option<PhysRanges> = None;
        let mut start = range.start();
        loop {
            let last = range.last().min(Iova::new(start.get() | (PAGE - 1)));
            let leaf = self.walk(links, start.get());
            if !leaf.allows(required) {
                return Err(denied(start, leaf, required));
            }
            let piece = within(leaf, start, last).ok_or((
                start,
                one_of(required),
                FaultReason::BadLength,
            ))?;
            let found = match pieces.take() {
                None => PhysRanges::one(piece),
                Some(mut pieces) => {
                    pieces.push(piece);
                    pieces
                }
            };
            // The range ends at 2^64 - 1 at the latest.
            match last.checked_add(1).filter(|_| last < range.last()) {
                Some(next) => (start, pieces) = (next, Some(found)),
                None => return Ok(found),
            }
        }
    }

    #[cold]
    fn beyond_width(&self, start: Iova, required: Permissions) -> Denied {
        let limit = 1_u64.checked_shl(self.width().bits()).unwrap_or(u64::MAX);
        let at = start.max(Iova::new(limit));
        (at, one_of(required), FaultReason::AddressBeyondWidth)
    }

    /// Returns the entry for the page of `iova`, which must fit the table's width. Absent if any
    /// entry on the path is absent.
    #[inline]
    fn walk(&self, links: &WalkCache, iova: u64) -> Leaf {
        links
            .find(iova)
            .or_else(|| self.table_of(links, iova))
            .and_then(|table| self.word(table | index(iova, GRANULE_SHIFT)))
            .map_or(Leaf::NONE, Leaf::read)
    }

    /// Returns the index of the first word of the leaf table for `iova`, and caches it in `links`.
    ///
    /// Requires a guard. The writer may reuse a table on the path for another range once no reader
    /// can have seen the link to it.
    fn table_of(&self, links: &WalkCache, iova: u64) -> Option<usize> {
        let mut table = 0;
        let mut shift = self.top();
        while shift > GRANULE_SHIFT {
            // Relaxed: the writer links a reused table only after a wait for readers. A reader that
            // sees the link went online, or passed a checkpoint, after the old entries were
            // removed.
            match self
                .word(table | index(iova, shift))?
                .load(Ordering::Relaxed)
            {
                Leaf::ABSENT => return None,
                next => table = next as usize,
            }
            shift -= INDEX_BITS;
        }
        links.keep(iova, table);
        Some(table)
    }
}

#[cold]
fn denied(iova: Iova, leaf: Leaf, required: Permissions) -> Denied {
    if leaf.is_absent() {
        (iova, one_of(required), FaultReason::NotPresent)
    } else if required.allows(Access::Read) && !leaf.allows(Permissions::READ) {
        (iova, Access::Read, FaultReason::ReadDenied)
    } else {
        (iova, Access::Write, FaultReason::WriteDenied)
    }
}

/// Returns the access to report if all of `required` fails.
pub(crate) fn one_of(required: Permissions) -> Access {
    if required.allows(Access::Read) {
        Access::Read
    } else {
        Access::Write
    }
}
