//! Covers a range of pages by aligned blocks, as page-selective invalidations name them.

use ringfence_types::PfnRange;

/// 2^`mask` pages, aligned to their number (ADDR and AM of an invalidation).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    /// Page number of the first page.
    pub(crate) first: u64,
    /// Address mask (AM).
    pub(crate) mask: u32,
}

/// Returns at most two blocks that hold every page of `range`; the second is `None` if one is
/// enough. The blocks hold less than twice the pages of their parts of the range.
///
/// The addresses of the range share all bits above the highest one in which its first and last page
/// number differ. The range is divided where that bit changes. Each part begins or ends there, so
/// the smallest block that holds it does too.
pub(crate) fn cover(range: &PfnRange) -> (Block, Option<Block>) {
    let (lo, hi) = (range.lo().get(), range.hi().get());
    let Some(top) = (lo ^ hi).checked_ilog2() else {
        return (Block { first: lo, mask: 0 }, None);
    };
    let boundary = hi >> top << top;
    let left = mask_of(boundary.wrapping_sub(lo));
    let right = mask_of(hi.wrapping_sub(boundary).wrapping_add(1));
    let first = Block {
        first: boundary.wrapping_sub(1 << left),
        mask: left,
    };
    if left == top && right == top {
        let mask = top.wrapping_add(1);
        return (Block { mask, ..first }, None);
    }
    let second = Block {
        first: boundary,
        mask: right,
    };
    (first, Some(second))
}

/// Returns the smallest mask of a block with `pages` pages, at least 1 and at most 2^52.
fn mask_of(pages: u64) -> u32 {
    pages.next_power_of_two().trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ringfence_types::Pfn;

    fn blocks(lo: u64, hi: u64) -> (Block, Option<Block>) {
        cover(&PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap())
    }

    #[test]
    fn golden_covers() {
        let block = |first, mask| Block { first, mask };
        for (lo, hi, expected) in [
            (5, 5, (block(5, 0), None)),
            (4, 5, (block(4, 1), None)),
            (5, 6, (block(5, 0), Some(block(6, 0)))),
            (0, 511, (block(0, 9), None)),
            (1, 511, (block(0, 9), None)),
            (1, 256, (block(0, 8), Some(block(256, 0)))),
            (255, 256, (block(255, 0), Some(block(256, 0)))),
            (
                (1 << 52) - 1,
                (1 << 52) - 1,
                (block((1 << 52) - 1, 0), None),
            ),
            (0, (1 << 52) - 1, (block(0, 52), None)),
        ] {
            assert_eq!(blocks(lo, hi), expected, "{lo}..={hi}");
        }
    }

    proptest! {
        /// The unit ignores the low `mask` bits of the address: a block that is not aligned would
        /// begin lower and end lower than meant.
        #[test]
        fn blocks_are_aligned_hold_the_range_and_are_not_much_larger(
            lo in 0_u64..1 << 52,
            pages in 1_u64..1 << 20,
        ) {
            let hi = (lo + pages - 1).min((1 << 52) - 1);
            let (first, second) = blocks(lo, hi);
            let end = |block: Block| block.first + (1 << block.mask);
            for block in [Some(first), second].into_iter().flatten() {
                prop_assert_eq!(block.first & ((1 << block.mask) - 1), 0);
            }
            prop_assert!(first.first <= lo);
            match second {
                Some(second) => {
                    prop_assert_eq!(end(first), second.first);
                    prop_assert!(end(second) > hi);
                    let held = end(second) - first.first;
                    prop_assert!(held < 2 * (hi - lo + 1));
                }
                None => prop_assert!(end(first) > hi && 1 << first.mask < 4 * (hi - lo + 1)),
            }
        }
    }
}
