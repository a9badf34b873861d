//! Last known positions of mappings, by first address.
//!
//! The table contains hints, not an index: mappings move within and between leaves without updating
//! it. The caller checks a hint on the cache line that it needs anyway; a wrong hint costs a
//! search. The table thus needs no maintenance. Addresses that a hostile driver chooses to collide
//! only make it useless.

use alloc::vec::Vec;

use super::EntryPosition;

/// Hints per bucket.
const WAYS: usize = 4;

/// Bits of a hint for the slot in a leaf.
const SLOT_BITS: u32 = super::LEAF.trailing_zeros();

/// Bits of a hint for the position. The other bits are a tag that distinguishes addresses with
/// equal hashes.
const POSITION_BITS: u32 = 24;

/// Minimum number of buckets.
const FEWEST: usize = 16;

/// Hints with the same hash, newest first.
#[derive(Debug, Clone, Copy)]
#[repr(align(16))]
struct Bucket([u32; WAYS]);

#[derive(Debug, Default)]
pub(super) struct PositionHints {
    /// The length is a power of two, or 0.
    buckets: Vec<Bucket>,
}

impl PositionHints {
    /// Returns the likely position of the mapping that starts at `start`.
    #[inline]
    pub(super) fn get(&self, start: u64) -> Option<EntryPosition> {
        let (at, tag) = self.hash(start);
        let Bucket(ways) = self.buckets.get(at)?;
        // Compare all four, without a branch that the CPU could mispredict.
        let packed = ways.iter().rev().fold(0, |found, guess| {
            if guess >> POSITION_BITS == tag {
                *guess
            } else {
                found
            }
        });
        let packed = (packed & ((1 << POSITION_BITS) - 1)) as usize;
        Some(EntryPosition {
            leaf: packed >> SLOT_BITS,
            at: packed & ((1 << SLOT_BITS) - 1),
        })
    }

    /// Records that the mapping that starts at `start` is in slot `at` of leaf `leaf`.
    pub(super) fn put(&mut self, start: u64, leaf: usize, at: usize) {
        let (bucket, tag) = self.hash(start);
        let packed = leaf << SLOT_BITS | at;
        let Some(Bucket(ways)) = self.buckets.get_mut(bucket) else {
            return;
        };
        // Higher leaf numbers, beyond at least eight million mappings, get no hints.
        if packed >> POSITION_BITS != 0 {
            return;
        }
        let same = ways.iter().position(|guess| guess >> POSITION_BITS == tag);
        let old = same.unwrap_or(WAYS - 1);
        if let Some(older) = ways.get_mut(..=old) {
            older.rotate_right(1);
        }
        if let Some(newest) = ways.first_mut() {
            *newest = tag << POSITION_BITS | packed as u32;
        }
    }

    /// Returns true if the table is too small for this number of mappings.
    #[inline]
    pub(super) const fn is_too_small(&self, mappings: usize) -> bool {
        mappings > self.buckets.len().saturating_mul(WAYS / 2)
    }

    /// Rebuilds the table with two to four hints per mapping, if memory is available. `entries`
    /// provides all positions.
    #[cold]
    pub(super) fn rebuild(
        &mut self,
        mappings: usize,
        entries: impl Iterator<Item = (u64, usize, usize)>,
    ) {
        let needed = mappings.div_ceil(WAYS / 2).max(FEWEST);
        let Some(needed) = needed.checked_next_power_of_two() else {
            return;
        };
        self.buckets.clear();
        if self.buckets.try_reserve_exact(needed).is_ok() {
            self.buckets.resize(needed, Bucket([0; WAYS]));
        }
        for (start, leaf, at) in entries {
            self.put(start, leaf, at);
        }
    }

    /// Returns the bucket for `start` and its tag: both ends of a product that depends on every bit
    /// of `start`.
    #[inline]
    fn hash(&self, start: u64) -> (usize, u32) {
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        let folded = start.wrapping_mul(GOLDEN);
        let hash = (folded ^ folded >> 32).wrapping_mul(GOLDEN);
        let bucket = (hash >> 32) as usize & self.buckets.len().wrapping_sub(1);
        (bucket, hash as u32 >> POSITION_BITS)
    }
}
