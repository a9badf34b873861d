//! Last known positions of mappings, by first address.
//!
//! The table contains hints, not an index: mappings move within and between leaves, and
//! the table needs no update then. The caller checks a hint on the cache line that it needs anyway;
//! a wrong hint costs a search. Addresses that a hostile driver chooses to collide only make the
//! table useless.

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
const MIN_BUCKETS: usize = 16;

/// Hints with the same hash, newest first. Aligned to its size, so that a lookup reads one cache
/// line.
#[derive(Debug, Clone, Copy)]
#[repr(align(16))]
struct Bucket([u32; WAYS]);

#[derive(Debug, Default)]
pub(super) struct PositionHints {
    /// The length is a power of two, or 0.
    buckets: Vec<Bucket>,
}

impl PositionHints {
    /// Returns the likely position of the mapping that starts at `start`. Without a hint, returns
    /// position 0, which the caller's check rejects. `None` if the table is empty.
    #[inline]
    pub(super) fn get(&self, start: u64) -> Option<EntryPosition> {
        let (at, tag) = self.hash(start);
        let Bucket(ways) = self.buckets.get(at)?;
        // Compare all four, without a branch that the CPU could mispredict.
        let packed = ways.iter().rev().fold(0, |found, hint| {
            if hint >> POSITION_BITS == tag {
                *hint
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
        let Some(Bucket(ways)) = self.buckets.get_mut(bucket) else {
            return;
        };
        // Higher leaf numbers, beyond at least eight million mappings, get no hints.
        if leaf >> (POSITION_BITS - SLOT_BITS) != 0 || at >> SLOT_BITS != 0 {
            return;
        }
        let packed = leaf << SLOT_BITS | at;
        let same = ways.iter().position(|hint| hint >> POSITION_BITS == tag);
        let old = same.unwrap_or(WAYS - 1);
        if let Some(older) = ways.get_mut(..=old) {
            older.rotate_right(1);
        }
        if let Some(newest) = ways.first_mut() {
            *newest = tag << POSITION_BITS | packed as u32;
        }
    }

    /// Returns true if the table is too small for this number of mappings. Stays true after
    /// [`rebuild`](Self::rebuild) found no memory, so the next insertion tries again.
    #[inline]
    pub(super) const fn is_too_small(&self, mappings: usize) -> bool {
        mappings > self.buckets.len().saturating_mul(WAYS / 2)
    }

    /// Rebuilds the table with room for two to four hints per mapping, at least 64. `entries`
    /// provides all positions. Keeps the old table if memory is not available.
    #[cold]
    pub(super) fn rebuild(
        &mut self,
        mappings: usize,
        entries: impl Iterator<Item = (u64, usize, usize)>,
    ) {
        let needed = mappings.div_ceil(WAYS / 2).max(MIN_BUCKETS);
        let Some(needed) = needed.checked_next_power_of_two() else {
            return;
        };
        let mut buckets = Vec::new();
        if buckets.try_reserve_exact(needed).is_err() {
            return;
        }
        buckets.resize(needed, Bucket([0; WAYS]));
        self.buckets = buckets;
        for (start, leaf, at) in entries {
            self.put(start, leaf, at);
        }
    }

    /// Returns the bucket for `start` and its tag. The bucket comes from bits 32 up of a product
    /// that depends on every bit of `start`, the tag from bits 31:24.
    #[inline]
    fn hash(&self, start: u64) -> (usize, u32) {
        // The odd integer nearest to 2^64 divided by the golden ratio (Knuth, TAOCP 6.4).
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        let folded = start.wrapping_mul(GOLDEN);
        let hash = (folded ^ folded >> 32).wrapping_mul(GOLDEN);
        let bucket = (hash >> 32) as usize & self.buckets.len().wrapping_sub(1);
        (bucket, hash as u32 >> POSITION_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Position of a hint; (0, 0) without one.
    fn position(hints: &PositionHints, start: u64) -> (usize, usize) {
        let found = hints.get(start).unwrap();
        (found.leaf, found.at)
    }

    #[test]
    fn an_empty_table_has_no_position() {
        let mut hints = PositionHints::default();
        hints.put(0x1000, 1, 1);
        assert!(hints.get(0x1000).is_none() && hints.is_too_small(1));
    }

    /// Five addresses of one bucket with different tags: the oldest hint is replaced.
    #[test]
    fn a_full_bucket_replaces_its_oldest_hint() {
        let mut hints = PositionHints::default();
        hints.rebuild(1, core::iter::empty());
        let (bucket, _) = hints.hash(0x1000);
        let mut tags = Vec::new();
        let mut starts = Vec::new();
        for page in 1_u64.. {
            let (at, tag) = hints.hash(page << 12);
            if at == bucket && tag != 0 && !tags.contains(&tag) {
                tags.push(tag);
                starts.push(page << 12);
            }
            if starts.len() > WAYS {
                break;
            }
        }
        for (leaf, start) in starts.iter().enumerate() {
            hints.put(*start, leaf + 1, 7);
        }
        let found: Vec<_> = starts
            .iter()
            .map(|start| position(&hints, *start))
            .collect();
        assert_eq!(found, [(0, 0), (2, 7), (3, 7), (4, 7), (5, 7)]);
        // A new position of an address replaces its own hint only.
        hints.put(starts[2], 9, 1);
        assert_eq!(position(&hints, starts[2]), (9, 1));
        assert_eq!(position(&hints, starts[1]), (2, 7));
        // A position that does not fit gets no hint, even if the shift drops all of its bits.
        for (leaf, at) in [
            (1 << (POSITION_BITS - SLOT_BITS), 0),
            (1 << (usize::BITS - SLOT_BITS), 0),
            (0, 1 << SLOT_BITS),
        ] {
            hints.put(starts[2], leaf, at);
            assert_eq!(position(&hints, starts[2]), (9, 1), "{leaf:#x}, {at:#x}");
        }
    }

    /// Each insertion asks for a larger table. Without memory for it, none may walk all entries.
    #[test]
    fn hints_stay_if_no_memory_is_available_for_a_larger_table() {
        let mut hints = PositionHints::default();
        hints.rebuild(1, [(0x1000, 3, 5)].into_iter());
        hints.rebuild(usize::MAX / 4, core::iter::from_fn(|| panic!("a walk")));
        let found = hints
            .get(0x1000)
            .map(|position| (position.leaf, position.at));
        assert_eq!(found, Some((3, 5)));
    }
}
