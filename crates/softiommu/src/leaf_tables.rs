//! The writer's iteration over a range: one leaf table, or one hole, per step.

use std::iter;

use ringfence_types::{Iova, IovaRange};

use crate::sync::{AtomicU64, INDEX_BITS, Ordering};
use crate::table::{GRANULE_SHIFT, Leaf, TABLE_SHIFT, Table, index};

/// Part of a range, within one leaf table or one hole.
pub(crate) struct LeafTableRange {
    pub(crate) range: IovaRange,
    /// Index of the first word of the leaf table.
    pub(crate) table: Result<usize, Hole>,
}

/// A hole: no table exists for the block of `1 << shift` bytes around an address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hole {
    shift: u32,
}

impl Table {
    /// Returns the index of the first word of the leaf table for `iova`. For the writer only.
    #[inline]
    fn find(&self, iova: u64) -> Result<usize, Hole> {
        let mut at = 0;
        let mut shift = self.top();
        while shift > GRANULE_SHIFT {
            // Relaxed: only the writer stores.
            match self
                .word(at | index(iova, shift))
                .map(|word| word.load(Ordering::Relaxed))
            {
                None | Some(Leaf::ABSENT) => return Err(Hole { shift }),
                Some(next) => at = next as usize,
            }
            shift -= INDEX_BITS;
        }
        Ok(at)
    }

    /// Splits `range`, which must fit the table's width, into leaf tables and holes. The caller may
    /// link tables during the iteration.
    #[inline]
    pub(crate) fn leaf_tables(&self, range: &IovaRange) -> impl Iterator<Item = LeafTableRange> {
        let mut rest = Some(*range);
        iter::from_fn(move || {
            let whole = rest?;
            let table = self.find(whole.start().get());
            let shift = match table {
                Ok(_) => TABLE_SHIFT,
                Err(hole) => hole.shift,
            };
            let (range, next) = split(&whole, shift);
            rest = next;
            Some(LeafTableRange { range, table })
        })
    }

    /// Returns the entries of the pages of `part` in the leaf table at `at`, which must cover all
    /// of `part`.
    #[inline]
    pub(crate) fn words(&self, at: usize, part: &IovaRange) -> &[AtomicU64] {
        let first = at | index(part.start().get(), GRANULE_SHIFT);
        let last = at | index(part.last().get(), GRANULE_SHIFT);
        self.all().get(first..=last).unwrap_or_default()
    }
}

/// Splits `range` into parts that each lie within one leaf table.
#[inline]
pub(crate) fn parts(range: &IovaRange) -> impl Iterator<Item = IovaRange> + use<> {
    let mut rest = Some(*range);
    iter::from_fn(move || {
        let (part, next) = split(&rest?, TABLE_SHIFT);
        rest = next;
        Some(part)
    })
}

/// Splits `range` at the next multiple of `1 << shift`; `shift` is less than 64.
#[inline]
fn split(range: &IovaRange, shift: u32) -> (IovaRange, Option<IovaRange>) {
    let boundary = Iova::new(range.start().get() | ((1 << shift) - 1));
    let next = boundary
        .checked_add(1)
        .and_then(|next| IovaRange::inclusive(next, range.last()));
    let first = match next {
        Some(_) => IovaRange::inclusive(range.start(), boundary).unwrap_or(*range),
        None => *range,
    };
    (first, next)
}

impl LeafTableRange {
    /// Returns the number of tables that a mapping of the whole part lacks if the part is `hole`.
    pub(crate) fn missing(&self, hole: Hole) -> u64 {
        let mut missing = 0_u64;
        let mut shift = TABLE_SHIFT;
        while shift <= hole.shift {
            let tables = (self.range.last().get() >> shift) - (self.range.start().get() >> shift);
            missing = missing.saturating_add(tables).saturating_add(1);
            shift += INDEX_BITS;
        }
        missing
    }
}
