//! Physical addresses of a trace, brought into the 64 GiB of a replay's arena.

use std::collections::HashMap;

use ringfence_types::{PhysAddr, PhysRange};

/// Size of the arena.
const ARENA_SHIFT: u32 = 36;
/// What is renamed at a time: 1 GiB.
const GRANULE_SHIFT: u32 = 30;
const GRANULE: u64 = 1 << GRANULE_SHIFT;
const GRANULES: u64 = 1 << (ARENA_SHIFT - GRANULE_SHIFT);
const PAGE: u64 = 4096;

/// No granule is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Exhausted;

/// Why there are no fresh frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoFrames {
    /// No granule is left.
    Exhausted,
    /// More than a granule was asked for.
    TooLarge { bytes: u64 },
}

/// Renames granules above the arena to unused ones inside it, for good. A granule inside keeps its place
/// unless a renamed one already took it, which happens last: renaming starts at the top.
#[derive(Debug, Default)]
pub(super) struct Arena {
    /// Bit n: granule n of the arena is taken.
    taken: u64,
    /// Where recorded granules went that did not keep their place.
    renamed: HashMap<u64, u64>,
    /// Bit n: recorded granule n keeps its place.
    kept: u64,
    /// The granule fresh frames come from, and how much of it is used.
    fresh: Option<(u64, u64)>,
    /// Fresh frames given back, by size in pages.
    returned: HashMap<u64, Vec<u64>>,
}

impl Arena {
    /// Brings `range` into the arena: appends it to `out`, in parts if a granule boundary tears it; true if
    /// it was renamed.
    #[inline]
    pub(super) fn place(
        &mut self,
        range: PhysRange,
        out: &mut Vec<PhysRange>,
    ) -> Result<bool, Exhausted> {
        let (first, last) = (
            range.start().get() >> GRANULE_SHIFT,
            range.last().get() >> GRANULE_SHIFT,
        );
        if last < GRANULES && self.keeps(first) && self.keeps(last) && last - first <= 1 {
            out.push(range);
            return Ok(false);
        }
        self.place_slowly(range, out)
    }

    fn keeps(&self, granule: u64) -> bool {
        self.kept >> (granule & 63) & 1 != 0
    }

    fn place_slowly(
        &mut self,
        range: PhysRange,
        out: &mut Vec<PhysRange>,
    ) -> Result<bool, Exhausted> {
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
            // Join what still touches, within this range only.
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

    /// Where a recorded granule is in the arena.
    fn granule(&mut self, recorded: u64) -> Result<u64, Exhausted> {
        if recorded < GRANULES {
            if self.keeps(recorded) {
                return Ok(recorded);
            }
            if self.taken >> recorded & 1 == 0 {
                self.taken |= 1 << recorded;
                self.kept |= 1 << recorded;
                return Ok(recorded);
            }
        }
        if let Some(&new) = self.renamed.get(&recorded) {
            return Ok(new);
        }
        // Beside its neighbour if possible, so that a buffer across the boundary stays in one piece.
        let neighbour = |offset: i64| {
            let beside = recorded.checked_add_signed(offset)?;
            let at = match beside < GRANULES && self.keeps(beside) {
                true => beside,
                false => *self.renamed.get(&beside)?,
            };
            let wanted = at.checked_add_signed(-offset)?;
            (wanted < GRANULES && self.taken >> wanted & 1 == 0).then_some(wanted)
        };
        let new = match neighbour(-1).or_else(|| neighbour(1)) {
            Some(new) => new,
            None => self
                .roomy()
                .or_else(|| self.highest_free())
                .ok_or(Exhausted)?,
        };
        self.taken |= 1 << new;
        self.renamed.insert(recorded, new);
        Ok(new)
    }

    /// The highest free granule with three free ones above it, where its recorded successors can follow it.
    fn roomy(&self) -> Option<u64> {
        (0..GRANULES - 3)
            .rev()
            .find(|&granule| self.taken >> granule & 0b1111 == 0)
    }

    fn highest_free(&self) -> Option<u64> {
        (0..GRANULES)
            .rev()
            .find(|&granule| self.taken >> granule & 1 == 0)
    }

    /// Fresh frames for `bytes` bytes, at most one granule.
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
                let granule = self.highest_free().ok_or(NoFrames::Exhausted)?;
                self.taken |= 1 << granule;
                (granule, 0)
            }
        };
        self.fresh = Some((granule, used + length));
        let start = (granule << GRANULE_SHIFT) + used;
        PhysRange::new(PhysAddr::new(start), bytes).ok_or(too_large)
    }

    /// Takes fresh frames back.
    pub(super) fn give_back(&mut self, start: PhysAddr, bytes: u64) {
        let pages = bytes.div_ceil(PAGE);
        self.returned.entry(pages).or_default().push(start.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn place(
        arena: &mut Arena,
        start: u64,
        bytes: u64,
    ) -> Result<(Vec<(u64, u64)>, bool), Exhausted> {
        let mut out = Vec::new();
        let renamed = arena.place(
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
    fn low_addresses_stay_and_high_ones_move_below_64_gib_for_good() {
        let mut arena = Arena::default();
        assert_eq!(
            place(&mut arena, 5 * GIB + 7, 100),
            Ok((vec![(5 * GIB + 7, 100)], false))
        );
        let high = place(&mut arena, 100 * GIB + 7, 100);
        assert_eq!(high, Ok((vec![(60 * GIB + 7, 100)], true)));
        assert_eq!(place(&mut arena, 100 * GIB + 7, 100), high);
        // Its neighbours stay beside it, above as well as below, so buffers across a boundary stay whole.
        assert_eq!(
            place(&mut arena, 101 * GIB - 10, 20),
            Ok((vec![(61 * GIB - 10, 20)], true))
        );
        assert_eq!(
            place(&mut arena, 100 * GIB - 4096, 8192),
            Ok((vec![(60 * GIB - 4096, 8192)], true))
        );
        // A granule that a renamed one took moves too.
        assert_eq!(
            place(&mut arena, 60 * GIB, 1),
            Ok((vec![(55 * GIB, 1)], true))
        );
        assert_eq!(
            place(&mut arena, 5 * GIB, 1),
            Ok((vec![(5 * GIB, 1)], false))
        );
    }

    #[test]
    fn a_torn_buffer_becomes_two_segments() {
        let mut arena = Arena::default();
        for granule in 200..204 {
            place(&mut arena, granule * GIB, 1).unwrap();
        }
        // 203 lies at 63, so 204 cannot lie behind it.
        let torn = place(&mut arena, 204 * GIB - 10, 20);
        assert_eq!(torn, Ok((vec![(64 * GIB - 10, 10), (56 * GIB, 10)], true)));
    }

    #[test]
    fn no_two_recorded_granules_share_one_and_the_65th_is_refused() {
        let mut arena = Arena::default();
        let mut seen = std::collections::HashSet::new();
        for granule in (0..64).map(|n| (n * 37) % 200) {
            let (parts, _) = place(&mut arena, granule * GIB, 1).unwrap();
            assert!(seen.insert(parts[0].0));
        }
        assert_eq!(place(&mut arena, 1000 * GIB, 1), Err(Exhausted));
        assert_eq!(arena.fresh(1), Err(NoFrames::Exhausted));
        assert!(
            place(&mut arena, 37 * GIB, 1).is_ok(),
            "known ones still work"
        );
    }

    #[test]
    fn fresh_frames_do_not_overlap_and_are_used_again() {
        let mut arena = Arena::default();
        let first = arena.fresh(5000).unwrap();
        let second = arena.fresh(1).unwrap();
        assert!(
            !first
                .to_pages(ringfence_types::PageSize::Size4K)
                .overlaps(&second)
        );
        arena.give_back(first.start(), 5000);
        assert_eq!(arena.fresh(8192).unwrap().start(), first.start());
        let bytes = GIB + 1;
        assert_eq!(arena.fresh(bytes), Err(NoFrames::TooLarge { bytes }));
    }

    #[test]
    fn the_end_of_the_address_space_is_no_trap() {
        let mut arena = Arena::default();
        let (parts, _) = place(&mut arena, u64::MAX - 9, 10).unwrap();
        assert_eq!(parts, [(61 * GIB - 10, 10)]);
        let mut out = Vec::new();
        let all = PhysRange::inclusive(PhysAddr::ZERO, PhysAddr::new(u64::MAX)).unwrap();
        assert_eq!(arena.place(all, &mut out), Err(Exhausted));
        assert!(out.is_empty());
    }
}
