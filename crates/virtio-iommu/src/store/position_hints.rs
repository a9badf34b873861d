//! Where a mapping stood when it was last seen, by its first address.
//!
//! A table of guesses, not an index: mappings move within leaves and between them, and nobody tells
//! it. Who takes a guess looks whether it is right, in the one line of memory that is needed
//! anyway; a wrong one costs a search. So there is no upkeep, and addresses that a hostile driver
//! chooses to collide make it useless and nothing worse.

use alloc::vec::Vec;

use super::EntryPosition;

/// Guesses that share a hash.
const WAYS: usize = 4;

/// Bits of a guess for the slot in a leaf.
const SLOT_BITS: u32 = super::LEAF.trailing_zeros();

/// Bits of a guess for the place; the others tell its address from those that share its hash.
const PLACE_BITS: u32 = 24;

/// Buckets at least.
const FEWEST: usize = 16;

/// The guesses that share a hash, the newest first.
#[derive(Debug, Clone, Copy)]
#[repr(align(16))]
struct Bucket([u32; WAYS]);

#[derive(Debug, Default)]
pub(super) struct PositionHints {
    /// A power of two of them, or none.
    buckets: Vec<Bucket>,
}

impl PositionHints {
    /// Where the mapping that begins at `start` may stand.
    #[inline]
    pub(super) fn get(&self, start: u64) -> Option<EntryPosition> {
        let (at, tag) = self.hash(start);
        let Bucket(ways) = self.buckets.get(at)?;
        // All four in turn, without a branch that the processor could not foresee.
        let place = ways.iter().rev().fold(0, |found, guess| {
            if guess >> PLACE_BITS == tag {
                *guess
            } else {
                found
            }
        });
        let place = (place & ((1 << PLACE_BITS) - 1)) as usize;
        Some(EntryPosition {
            leaf: place >> SLOT_BITS,
            at: place & ((1 << SLOT_BITS) - 1),
        })
    }

    /// The mapping that begins at `start` stands in slot `at` of leaf `leaf`.
    pub(super) fn put(&mut self, start: u64, leaf: usize, at: usize) {
        let (bucket, tag) = self.hash(start);
        let place = leaf << SLOT_BITS | at;
        let Some(Bucket(ways)) = self.buckets.get_mut(bucket) else {
            return;
        };
        // Leaves with higher numbers, behind at least eight million mappings, have no guesses.
        if place >> PLACE_BITS != 0 {
            return;
        }
        let same = ways.iter().position(|guess| guess >> PLACE_BITS == tag);
        let old = same.unwrap_or(WAYS - 1);
        if let Some(older) = ways.get_mut(..=old) {
            older.rotate_right(1);
        }
        if let Some(newest) = ways.first_mut() {
            *newest = tag << PLACE_BITS | place as u32;
        }
    }

    /// Whether there are too few for so many mappings.
    #[inline]
    pub(super) const fn is_too_small(&self, mappings: usize) -> bool {
        mappings > self.buckets.len().saturating_mul(WAYS / 2)
    }

    /// Two to four guesses for each of `mappings`, if the host has the memory; `known` says where
    /// they stand.
    #[cold]
    pub(super) fn rebuild(
        &mut self,
        mappings: usize,
        known: impl Iterator<Item = (u64, usize, usize)>,
    ) {
        let wanted = mappings.div_ceil(WAYS / 2).max(FEWEST);
        let Some(wanted) = wanted.checked_next_power_of_two() else {
            return;
        };
        self.buckets.clear();
        if self.buckets.try_reserve_exact(wanted).is_ok() {
            self.buckets.resize(wanted, Bucket([0; WAYS]));
        }
        for (start, leaf, at) in known {
            self.put(start, leaf, at);
        }
    }

    /// The bucket for `start`, and what tells it from others there: the ends of a product in which
    /// every bit of `start` counts.
    #[inline]
    fn hash(&self, start: u64) -> (usize, u32) {
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        let folded = start.wrapping_mul(GOLDEN);
        let hash = (folded ^ folded >> 32).wrapping_mul(GOLDEN);
        let bucket = (hash >> 32) as usize & self.buckets.len().wrapping_sub(1);
        (bucket, hash as u32 >> PLACE_BITS)
    }
}
