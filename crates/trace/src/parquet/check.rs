//! Checks that rows are valid operations. A replay indexes arrays with ids and an arena with
//! segments. [`Operations`](crate::Operations) guarantees their range for text, and must guarantee
//! it for an untrusted file too.

use ringfence_types::{PhysAddr, PhysRange};

use crate::ARENA_BYTES;
use crate::limits::{Budget, Progress, TraceLimits};
use crate::op::{DeviceIndex, MappingId};

/// State of the rows read so far.
#[derive(Debug, Default)]
pub(super) struct Checker {
    time: u64,
    /// Device of each live mapping, indexed by mapping id.
    live: Vec<Option<DeviceIndex>>,
    alive: usize,
    pub(super) budget: Budget,
    /// Size of the file in bytes.
    input: u64,
}

impl Checker {
    /// Creates a checker for a file of `input` bytes.
    pub(super) fn new(limits: TraceLimits, input: u64) -> Self {
        Self {
            budget: Budget::new(limits),
            input,
            ..Self::default()
        }
    }

    /// Returns the progress of the reader at `row`.
    pub(super) fn progress(&self, row: u64) -> Progress {
        Progress {
            input: self.input,
            lines: row,
        }
    }

    /// Returns true if time does not run backwards.
    pub(super) fn time(&mut self, time: u64) -> bool {
        let fits = time >= self.time;
        self.time = self.time.max(time);
        fits
    }

    /// Returns true if the map takes a free id, or a new id when no other is free. This keeps ids
    /// dense.
    pub(super) fn map(&mut self, id: u32, device: DeviceIndex) -> bool {
        let index = id as usize;
        if index == self.live.len() && self.alive == self.live.len() {
            self.live.push(None);
        }
        match self.live.get_mut(index) {
            Some(slot @ None) => {
                *slot = Some(device);
                self.alive += 1;
                true
            }
            _ => false,
        }
    }

    /// Returns true if the unmap removes a live mapping of the same device.
    pub(super) fn unmap(&mut self, id: u32, device: DeviceIndex) -> bool {
        match self.live.get_mut(id as usize) {
            Some(slot) if *slot == Some(device) => {
                *slot = None;
                self.alive -= 1;
                self.budget.unmap(id as usize);
                true
            }
            _ => false,
        }
    }

    /// Returns the live mappings, in order of their ids.
    pub(super) fn live(&self) -> impl Iterator<Item = MappingId> {
        (0u32..)
            .zip(&self.live)
            .filter_map(|(id, device)| device.map(|_| MappingId(id)))
    }

    /// Returns the segment if it lies within the arena.
    pub(super) fn segment(start: u64, bytes: u64) -> Option<PhysRange> {
        let range = PhysRange::new(PhysAddr::new(start), bytes)?;
        (range.last().get() < ARENA_BYTES).then_some(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_dense_and_pairs_are_pairs() {
        let (a, b) = (DeviceIndex(0), DeviceIndex(1));
        let mut checker = Checker::default();
        assert!(!checker.map(1, a), "0 is free");
        assert!(checker.map(0, a));
        assert!(!checker.map(0, a), "alive");
        assert!(checker.map(1, a));
        assert!(!checker.unmap(1, b), "another's");
        assert!(checker.unmap(0, a));
        assert!(!checker.unmap(0, a), "dead");
        assert!(!checker.map(2, a), "0 is free");
        assert!(checker.map(0, b));
        assert!(!checker.unmap(u32::MAX, a));
    }

    #[test]
    fn segments_stay_in_the_arena() {
        let cases = [
            (0, 1, true),
            (ARENA_BYTES - 1, 1, true),
            (ARENA_BYTES - 1, 2, false),
            (ARENA_BYTES, 1, false),
            (0, 0, false),
            (u64::MAX, 2, false),
        ];
        for (start, bytes, fits) in cases {
            assert_eq!(Checker::segment(start, bytes).is_some(), fits, "{start:#x}");
        }
    }
}
