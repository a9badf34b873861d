//! Places the physical addresses of a trace into a replay's arena: low addresses stay, high ones
//! are renamed.

use std::collections::HashMap;

use ringfence_types::{PhysAddr, PhysRange};

/// Size of the memory that a replay must provide, from address 0 on, in bytes. The memory may be
/// sparse. It contains all segments.
pub const ARENA_BYTES: u64 = 512 << 30;
/// Unit of renaming: 1 GiB.
const GRANULE_SHIFT: u32 = 30;
const GRANULE: u64 = 1 << GRANULE_SHIFT;
const GRANULES: u64 = ARENA_BYTES >> GRANULE_SHIFT;
/// Granules below this one (64 GiB) keep their address. The granules above hold renamed granules
/// and fresh frames.
const LOW_GRANULES: u64 = 64;
const PAGE: u64 = 4096;

/// No granule is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OutOfGranules;

/// Reason why no fresh frames are available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoFrames {
    /// No granule is free.
    OutOfGranules,
    /// The request exceeds one granule.
    TooLarge { bytes: u64 },
}

/// Renames granules above 64 GiB permanently to unused granules between 64 GiB and the arena's end.
/// A granule below 64 GiB keeps its address.
#[derive(Debug, Default)]
pub(super) struct ReplayArena {
    /// Bit n is set if granule n of the arena is taken. Granules that keep their address have no
    /// bit set.
    taken: [u64; (GRANULES / 64) as usize],
    /// Recorded granule of each renamed granule, mapped to its new one.
    renamed: HashMap<u64, u64>,
    /// The granule that fresh frames come from, and the number of its used bytes.
    fresh: Option<(u64, u64)>,
    /// Freed fresh frames, by size in pages.
    returned: HashMap<u64, Vec<u64>>,
}

impl ReplayArena {
    /// Renames `range` into the arena and appends it to `out`, split where granules are no longer
    /// adjacent. Returns true if it was renamed.
    #[inline]
    pub(super) fn rename_into_arena(
        &mut self,
        range: PhysRange,
        out: &mut Vec<PhysRange>,
    ) -> Result<bool, OutOfGranules> {
        if range.last().get() >> GRANULE_SHIFT < LOW_GRANULES {
            out.push(range);
            return Ok(false);
        }
        self.rename_granules(range, out)
    }

    fn rename_granules(
        &mut self,
        range: PhysRange,
        out: &mut Vec<PhysRange>,
    ) -> Result<bool, OutOfGranules> {
        let before = out.len();
        let mut renamed = false;
        let (start, end) = (range.start().get(), range.last().get());
        let mut at = start;
        loop {
            let granule = at >> GRANULE_SHIFT;
            let last = end.min(at | (GRANULE - 1));
            let new = self
                .granule(granule)
                .inspect_err(|_| out.truncate(before))?;
            renamed |= new != granule;
            let base = new << GRANULE_SHIFT;
            let part = PhysRange::inclusive(
                PhysAddr::new(base | (at & (GRANULE - 1))),
                PhysAddr::new(base | (last & (GRANULE - 1))),
            );
            // Merge parts that are still adjacent, within this range only.
            let joined =
                out.get(before..)
                    .and_then(<[_]>::last)
                    .zip(part)
                    .and_then(|(prior, part)| match prior.last().checked_add(1) {
                        Some(next) if next == part.start() => {
                            PhysRange::inclusive(prior.start(), part.last())
                        }
                        _ => None,
                    });
            match (joined, part) {
                (Some(joined), _) => {
                    if let Some(prior) = out.last_mut() {
                        *prior = joined;
                    }
                }
                (None, Some(part)) => out.push(part),
                (None, None) => {}
            }
            match last.checked_add(1) {
                Some(next) if last < end => at = next,
                _ => return Ok(renamed),
            }
        }
    }

    /// Returns the granule of the arena that holds a recorded granule.
    fn granule(&mut self, recorded: u64) -> Result<u64, OutOfGranules> {
        if recorded < LOW_GRANULES {
            return Ok(recorded);
        }
        if let Some(&new) = self.renamed.get(&recorded) {
            return Ok(new);
        }
        // Prefer the granule next to its neighbour's, so that a buffer across the boundary stays
        // contiguous.
        let neighbour = |offset: i64| {
            let neighbour = recorded.checked_add_signed(offset)?;
            let at = match neighbour < LOW_GRANULES {
                true => neighbour,
                false => *self.renamed.get(&neighbour)?,
            };
            let candidate = at.checked_add_signed(-offset)?;
            self.is_free(candidate).then_some(candidate)
        };
        let new = match neighbour(-1).or_else(|| neighbour(1)) {
            Some(new) => new,
            None => self
                .roomy()
                .or_else(|| self.highest_free())
                .ok_or(OutOfGranules)?,
        };
        self.take(new);
        self.renamed.insert(recorded, new);
        Ok(new)
    }

    fn is_free(&self, granule: u64) -> bool {
        let word = self.taken.get((granule / 64) as usize);
        granule >= LOW_GRANULES && word.is_some_and(|word| word >> (granule % 64) & 1 == 0)
    }

    fn take(&mut self, granule: u64) {
        if let Some(word) = self.taken.get_mut((granule / 64) as usize) {
            *word |= 1 << (granule % 64);
        }
    }

    /// Returns the lowest free granule with three free granules above it for its recorded
    /// successors, and one free granule below it for its predecessor. Granule 64 is kept for the
    /// successor of the memory that keeps its address.
    fn roomy(&self) -> Option<u64> {
        (LOW_GRANULES + 1..GRANULES)
            .find(|&granule| (granule - 1..granule + 4).all(|near| self.is_free(near)))
    }

    fn highest_free(&self) -> Option<u64> {
        (LOW_GRANULES..GRANULES)
            .rev()
            .find(|&granule| self.is_free(granule))
    }

    /// Allocates fresh frames for `bytes` bytes, at most one granule.
    pub(super) fn fresh(&mut self, bytes: u64) -> Result<PhysRange, NoFrames> {
        let pages = bytes.div_ceil(PAGE);
        let too_large = NoFrames::TooLarge { bytes };
        if let Some(start) = self.returned.get_mut(&pages).and_then(Vec::pop) {
            return PhysRange::new(PhysAddr::new(start), bytes).ok_or(too_large);
        }
        let length = pages.checked_mul(PAGE).filter(|&length| length <= GRANULE);
        let length = length.ok_or(too_large)?;
        let (granule, used) = match self.fresh {
            Some((granule, used)) if used + length <= GRANULE => (granule, used),
            _ => {
                let granule = self.highest_free().ok_or(NoFrames::OutOfGranules)?;
                self.take(granule);
                (granule, 0)
            }
        };
        self.fresh = Some((granule, used + length));
        let start = (granule << GRANULE_SHIFT) + used;
        PhysRange::new(PhysAddr::new(start), bytes).ok_or(too_large)
    }

    /// Frees fresh frames.
    pub(super) fn free_frames(&mut self, start: PhysAddr, bytes: u64) {
        let pages = bytes.div_ceil(PAGE);
        self.returned.entry(pages).or_default().push(start.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn rename(
        arena: &mut ReplayArena,
        start: u64,
        bytes: u64,
    ) -> Result<(Vec<(u64, u64)>, bool), OutOfGranules> {
        let mut out = Vec::new();
        let renamed = arena.rename_into_arena(
            PhysRange::new(PhysAddr::new(start), bytes).unwrap(),
            &mut out,
        )?;
        let parts = out
            .iter()
            .map(|part| (part.start().get(), part.bytes()))
            .collect();
        Ok((parts, renamed))
    }

    #[test]
    fn low_addresses_stay_and_high_ones_move_for_good() {
        let mut arena = ReplayArena::default();
        assert_eq!(
            rename(&mut arena, 5 * GIB + 7, 100),
            Ok((vec![(5 * GIB + 7, 100)], false))
        );
        let high = rename(&mut arena, 1000 * GIB + 7, 100);
        assert_eq!(high, Ok((vec![(65 * GIB + 7, 100)], true)));
        assert_eq!(rename(&mut arena, 1000 * GIB + 7, 100), high);
        // Its neighbours stay adjacent, above and below, so buffers across a boundary stay
        // contiguous.
        assert_eq!(
            rename(&mut arena, 1001 * GIB - 10, 20),
            Ok((vec![(66 * GIB - 10, 20)], true))
        );
        assert_eq!(
            rename(&mut arena, 1000 * GIB - 4096, 8192),
            Ok((vec![(65 * GIB - 4096, 8192)], true))
        );
        // Renamed granules never take the address of a granule that keeps its own.
        for granule in [0, 63] {
            assert_eq!(
                rename(&mut arena, granule * GIB, 1),
                Ok((vec![(granule * GIB, 1)], false))
            );
        }
        let next = rename(&mut arena, 65 * GIB, 1);
        assert!(next.is_ok_and(|(parts, renamed)| renamed && parts[0].0 > 66 * GIB));
    }

    #[test]
    fn a_buffer_across_64_gib_stays_whole() {
        let mut arena = ReplayArena::default();
        rename(&mut arena, 700 * GIB, 1).unwrap();
        assert_eq!(
            rename(&mut arena, 64 * GIB - 10, 20),
            Ok((vec![(64 * GIB - 10, 20)], false))
        );
    }

    #[test]
    fn a_torn_buffer_becomes_two_segments() {
        let mut arena = ReplayArena::default();
        // 1000 to 1003 are at 65 to 68, 2000 at 70 and its predecessor at 69, so 1004 cannot follow
        // 1003.
        for granule in [1000, 1001, 1002, 1003, 2000, 1999] {
            rename(&mut arena, granule * GIB, 1).unwrap();
        }
        let torn = rename(&mut arena, 1004 * GIB - 10, 20);
        assert_eq!(torn, Ok((vec![(69 * GIB - 10, 10), (72 * GIB, 10)], true)));
    }

    #[test]
    fn recorded_granules_stay_distinct() {
        let mut arena = ReplayArena::default();
        let mut seen = std::collections::HashSet::new();
        // A machine with a terabyte of memory in scattered order, until the arena is full.
        let order = (0..1024).map(|n| (n * 37) % 1024);
        let mut refused = 0;
        for granule in order {
            match rename(&mut arena, granule * GIB, 1) {
                Ok((parts, _)) => assert!(seen.insert(parts[0].0)),
                Err(OutOfGranules) => refused += 1,
            }
        }
        assert_eq!((seen.len(), refused), (512, 512));
        assert!(seen.iter().all(|&start| start < ARENA_BYTES));
        assert_eq!(arena.fresh(1), Err(NoFrames::OutOfGranules));
        assert!(
            rename(&mut arena, 37 * GIB, 1).is_ok(),
            "known ones still work"
        );
    }

    #[test]
    fn fresh_frames_do_not_overlap_and_are_used_again() {
        let mut arena = ReplayArena::default();
        let first = arena.fresh(5000).unwrap();
        let second = arena.fresh(1).unwrap();
        assert!(
            !first
                .to_pages(ringfence_types::PageSize::Size4K)
                .overlaps(&second)
        );
        arena.free_frames(first.start(), 5000);
        assert_eq!(arena.fresh(8192).unwrap().start(), first.start());
        let bytes = GIB + 1;
        assert_eq!(arena.fresh(bytes), Err(NoFrames::TooLarge { bytes }));
    }

    #[test]
    fn the_end_of_the_address_space_is_no_trap() {
        let mut arena = ReplayArena::default();
        let (parts, _) = rename(&mut arena, u64::MAX - 9, 10).unwrap();
        assert_eq!(parts, [(66 * GIB - 10, 10)]);
        let mut out = Vec::new();
        let all = PhysRange::inclusive(PhysAddr::ZERO, PhysAddr::new(u64::MAX)).unwrap();
        assert_eq!(arena.rename_into_arena(all, &mut out), Err(OutOfGranules));
        assert!(out.is_empty());
    }
}
