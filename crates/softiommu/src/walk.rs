//! The walk of a reader: from an address to the entry of its page, and from a range to its memory.

use ringfence_types::{Access, FaultReason, Iova, IovaRange, PageSize, Permissions, PhysRange};

use crate::pieces::Pieces;
use crate::sync::{INDEX_BITS, Ordering};
use crate::table::{GRANULE_SHIFT, Leaf, Table, index};

const PAGE: u64 = PageSize::Size4K.bytes();

/// The first address that is not translated, for which access, and why.
pub(crate) type Denied = (Iova, Access, FaultReason);

impl Table {
    /// The memory behind `range`, if every page of it is mapped for `wanted`. Nothing is given of a range that is not whole.
    ///
    /// Each entry is read once: what is checked is what is given.
    #[inline]
    pub(crate) fn translate(
        &self,
        range: IovaRange,
        wanted: Permissions,
    ) -> Result<Pieces, Denied> {
        let within = Iova::new(range.start().get() | (PAGE - 1));
        let first = self.within_page(&range, wanted)?;
        if range.last() <= within {
            Ok(Pieces::one(first))
        } else {
            self.scattered(range, Pieces::one(first), wanted)
        }
    }

    /// The memory behind the part of `range` in its first page. All of the range is checked against the width.
    #[inline]
    pub(crate) fn within_page(
        &self,
        range: &IovaRange,
        wanted: Permissions,
    ) -> Result<PhysRange, Denied> {
        let start = range.start();
        if !self.width().holds(range) {
            return Err(self.beyond(start, wanted));
        }
        let leaf = self.walk(start.get());
        if !leaf.allows(wanted) {
            return Err(denied(start, leaf, wanted));
        }
        let offset = start.offset_in(PAGE);
        let bytes = range.bytes().min(PAGE - offset);
        // A page does not wrap, so there is always a range.
        PhysRange::new(leaf.page().wrapping_add(offset), bytes).ok_or((
            start,
            one_of(wanted),
            FaultReason::BadLength,
        ))
    }

    /// The pages of `range` after the first one, whose piece is `pieces`.
    #[cold]
    fn scattered(
        &self,
        range: IovaRange,
        mut pieces: Pieces,
        wanted: Permissions,
    ) -> Result<Pieces, Denied> {
        let mut page = range.start().align_down(PAGE);
        while let Some(rest) = page
            .checked_add(PAGE)
            .and_then(|next| IovaRange::inclusive(next, range.last()))
        {
            page = rest.start();
            pieces.push(self.within_page(&rest, wanted)?);
        }
        Ok(pieces)
    }

    #[cold]
    fn beyond(&self, start: Iova, wanted: Permissions) -> Denied {
        let limit = 1_u64.checked_shl(self.width().bits()).unwrap_or(u64::MAX);
        let at = start.max(Iova::new(limit));
        (at, one_of(wanted), FaultReason::AddressBeyondWidth)
    }

    /// The entry for the page of `iova`, which the table's width holds. Absent if any entry on the path is.
    ///
    /// Only under a pin: a table on the path may be given to another range once no reader can have seen the entry that led to it.
    #[inline]
    fn walk(&self, iova: u64) -> Leaf {
        let mut table = 0;
        let mut shift = self.top();
        while shift > GRANULE_SHIFT {
            // Relaxed: a table that was used for another range before is linked only after a wait for readers, so whoever sees the
            // link went online, or passed a checkpoint, when the entries before were gone.
            match self.load(table | index(iova, shift), Ordering::Relaxed) {
                Leaf::ABSENT => return Leaf::from_word(Leaf::ABSENT),
                next => table = next as usize,
            }
            shift -= INDEX_BITS;
        }
        // R3. Acquire: whoever sees a mapping sees what was done to the page before it was mapped.
        Leaf::from_word(self.load(table | index(iova, GRANULE_SHIFT), Ordering::Acquire))
    }

    #[inline]
    fn load(&self, at: usize, ordering: Ordering) -> u64 {
        self.word(at)
            .map_or(Leaf::ABSENT, |word| word.load(ordering))
    }
}

#[cold]
fn denied(iova: Iova, leaf: Leaf, wanted: Permissions) -> Denied {
    if leaf.is_absent() {
        (iova, one_of(wanted), FaultReason::NotPresent)
    } else if wanted.allows(Access::Read) && !leaf.allows(Permissions::READ) {
        (iova, Access::Read, FaultReason::ReadDenied)
    } else {
        (iova, Access::Write, FaultReason::WriteDenied)
    }
}

/// The access to blame where all of `wanted` fails.
pub(crate) fn one_of(wanted: Permissions) -> Access {
    if wanted.allows(Access::Read) {
        Access::Read
    } else {
        Access::Write
    }
}
