//! Blocks of pages that the commands of invalidation interfaces name.

use crate::{Pfn, PfnRange};

/// 2^`order` pages, the first of which has a number that is a multiple of 2^`order`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PfnBlock {
    first: Pfn,
    order: u32,
}

impl PfnBlock {
    /// The block of all pages.
    pub const ALL: Self = Self {
        first: Pfn::new(0),
        order: 52,
    };

    /// Returns the first page.
    #[inline]
    pub const fn first(&self) -> Pfn {
        self.first
    }

    /// Returns the binary logarithm of the number of pages, at most 52.
    #[inline]
    pub const fn order(&self) -> u32 {
        self.order
    }

    /// Returns the last page.
    #[inline]
    pub const fn last(&self) -> Pfn {
        Pfn::new(self.first.get() | ((1 << self.order) - 1))
    }

    /// Returns the smallest block that holds `range`.
    pub const fn enclosing(range: &PfnRange) -> Self {
        let (lo, hi) = (range.lo().get(), range.hi().get());
        let order = u64::BITS - (lo ^ hi).leading_zeros();
        Self {
            first: Pfn::new(lo >> order << order),
            order,
        }
    }

    /// Returns the largest block of at most 2^`most` pages at `first` that ends in `range`.
    fn largest(first: Pfn, range: &PfnRange, most: u32) -> Self {
        let pages = PfnRange::spanning(first, range.hi()).pages();
        let order = pages.ilog2().min(first.get().trailing_zeros()).min(most);
        Self { first, order }
    }
}

impl From<PfnBlock> for PfnRange {
    fn from(block: PfnBlock) -> Self {
        Self::spanning(block.first(), block.last())
    }
}

impl PfnRange {
    /// Returns at most two blocks that hold every page of the range; the second is `None` if one is
    /// enough. They hold fewer than twice the pages of their parts of the range.
    ///
    /// The blocks meet at the highest bit that differs between the first and the last page number.
    /// One block around the range could hold any number of pages: a range of two pages around the
    /// middle of the space would need a block of all pages.
    pub fn cover(&self) -> (PfnBlock, Option<PfnBlock>) {
        let whole = PfnBlock::enclosing(self);
        let Some(half) = whole.order.checked_sub(1) else {
            return (whole, None);
        };
        let middle = self.hi().get() >> half << half;
        let below = Pfn::new(middle.saturating_sub(1));
        let left = PfnBlock::enclosing(&Self::spanning(self.lo(), below));
        let right = PfnBlock::enclosing(&Self::spanning(Pfn::new(middle), self.hi()));
        if left.order == half && right.order == half {
            return (whole, None);
        }
        (left, Some(right))
    }

    /// Divides the range into the fewest blocks of at most 2^`most` pages.
    pub fn blocks(&self, most: u32) -> impl Iterator<Item = PfnBlock> + use<> {
        let range = *self;
        let first = PfnBlock::largest(range.lo(), &range, most);
        core::iter::successors(Some(first), move |block| {
            let next = Pfn::new(block.last().get() + 1);
            (block.last() < range.hi()).then(|| PfnBlock::largest(next, &range, most))
        })
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::vec::Vec;

    const LAST: u64 = (1 << 52) - 1;

    fn range(lo: u64, hi: u64) -> PfnRange {
        PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap()
    }

    fn block(first: u64, order: u32) -> PfnBlock {
        PfnBlock {
            first: Pfn::new(first),
            order,
        }
    }

    #[test]
    fn golden_covers() {
        for (lo, hi, first, second) in [
            (5, 5, block(5, 0), None),
            (4, 5, block(4, 1), None),
            (5, 6, block(5, 0), Some(block(6, 0))),
            (0, 2, block(0, 1), Some(block(2, 0))),
            (0, 511, block(0, 9), None),
            // Both halves are needed whole: one block holds them.
            (1, 511, block(0, 9), None),
            (3, 12, block(0, 4), None),
            (6, 9, block(6, 1), Some(block(8, 1))),
            (1, 256, block(0, 8), Some(block(256, 0))),
            (255, 256, block(255, 0), Some(block(256, 0))),
            (
                0x7_ffff,
                0x8_0000,
                block(0x7_ffff, 0),
                Some(block(0x8_0000, 0)),
            ),
            (LAST, LAST, block(LAST, 0), None),
            (0, LAST, PfnBlock::ALL, None),
        ] {
            assert_eq!(range(lo, hi).cover(), (first, second), "{lo:#x} to {hi:#x}");
        }
    }

    #[test]
    fn golden_divisions() {
        for (lo, hi, most, blocks) in [
            (5, 5, 52, &[block(5, 0)][..]),
            (0, 511, 52, &[block(0, 9)]),
            (0, 511, 8, &[block(0, 8), block(256, 8)]),
            (4, 6, 0, &[block(4, 0), block(5, 0), block(6, 0)]),
            (1, 4, 52, &[block(1, 0), block(2, 1), block(4, 0)]),
            (LAST - 1, LAST, 52, &[block(LAST - 1, 1)]),
            (0, LAST, 52, &[PfnBlock::ALL]),
        ] {
            let found: Vec<_> = range(lo, hi).blocks(most).collect();
            assert_eq!(found, blocks, "{lo:#x} to {hi:#x}");
        }
    }

    /// Every range of a small space, and at its end.
    #[test]
    fn blocks_are_aligned_hold_the_range_and_are_not_much_larger() {
        let ends = (0..64).flat_map(|lo| (lo..64).map(move |hi| (lo, hi)));
        for (lo, hi) in ends.flat_map(|(lo, hi)| [(lo, hi), (LAST - hi, LAST - lo)]) {
            let pages = hi - lo + 1;
            let (first, second) = range(lo, hi).cover();
            for block in [Some(first), second].into_iter().flatten() {
                assert_eq!(
                    block.first().get() % (1 << block.order()),
                    0,
                    "{lo} to {hi}"
                );
            }
            let last = second.unwrap_or(first).last().get();
            assert!(first.first().get() <= lo && hi <= last, "{lo} to {hi}");
            let held = last - first.first().get() + 1;
            if let Some(second) = second {
                assert_eq!(first.last().get() + 1, second.first().get());
                assert!(held < 2 * pages, "{lo} to {hi}");
            }
            assert!(held < 4 * pages, "{lo} to {hi}");
            let mut next = lo;
            for block in range(lo, hi).blocks(3) {
                assert_eq!(block.first().get(), next);
                assert!(block.order() <= 3 && next % (1 << block.order()) == 0);
                next = block.last().get() + 1;
            }
            assert_eq!(next, hi + 1);
        }
    }
}
