//! The pages or bytes that open bursts withhold. They are runs, so a mapping of 64 GiB takes one
//! entry.

use std::collections::BTreeMap;

use ringfence_types::{PageSize, PhysRange};

/// A run of pages or bytes; `end` is exclusive. Physical addresses have 64 bits, so page numbers
/// are at most 2^52.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WithheldRun {
    first: u64,
    end: u64,
}

impl WithheldRun {
    /// Returns the pages that a buffer covers.
    pub(super) fn pages(buffer: &PhysRange) -> Self {
        let shift = PageSize::Size4K.shift();
        Self {
            first: buffer.start().get() >> shift,
            end: (buffer.last().get() >> shift) + 1,
        }
    }

    /// Returns the bytes of a buffer, without the last one of the address space.
    pub(super) fn bytes(buffer: &PhysRange) -> Self {
        Self {
            first: buffer.start().get(),
            end: buffer.last().get().saturating_add(1),
        }
    }
}

/// Counts how many times each page or byte is withheld. A run adds at most two edges, so the
/// buffers of open bursts bound its size.
#[derive(Debug, Clone, Default)]
pub(super) struct Withheld {
    /// Maps a unit to the count of every unit from it up to the next edge. Neighbouring counts
    /// differ, and the first is not 0: units below the first edge are not withheld.
    edges: BTreeMap<u64, u32>,
}

impl Withheld {
    /// Increments the count of the units of `run`.
    pub(super) fn add(&mut self, run: WithheldRun) {
        self.change(run, |times| times.saturating_add(1));
    }

    /// Undoes one [`add`](Self::add).
    pub(super) fn remove(&mut self, run: WithheldRun) {
        self.change(run, |times| times.saturating_sub(1));
    }

    /// Returns true if any unit of `run` is withheld.
    pub(super) fn any(&self, run: &WithheldRun) -> bool {
        self.at(run.first) > 0 || self.edges.range(run.first..run.end).any(|(_, &n)| n > 0)
    }

    fn at(&self, page: u64) -> u32 {
        let edge = self.edges.range(..=page).next_back();
        edge.map_or(0, |(_, &times)| times)
    }

    fn change(&mut self, run: WithheldRun, change: impl Fn(u32) -> u32) {
        for edge in [run.first, run.end] {
            let times = self.at(edge);
            self.edges.entry(edge).or_insert(times);
        }
        for (_, times) in self.edges.range_mut(run.first..run.end) {
            *times = change(*times);
        }
        // All counts in between change equally. Only at the two ends can a count now equal the one
        // below it.
        for edge in [run.first, run.end] {
            let below = self.edges.range(..edge).next_back();
            let below = below.map_or(0, |(_, &times)| times);
            if self.edges.get(&edge) == Some(&below) {
                self.edges.remove(&edge);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringfence_types::PhysAddr;

    use super::*;

    fn run(first: u64, last: u64) -> WithheldRun {
        let last = PhysAddr::new((last << 12) + 17);
        WithheldRun::pages(&PhysRange::inclusive(PhysAddr::new((first << 12) + 1), last).unwrap())
    }

    #[test]
    fn the_ends_of_the_address_space_are_pages_like_others() {
        let all = PhysRange::inclusive(PhysAddr::ZERO, PhysAddr::new(u64::MAX)).unwrap();
        let top = PhysRange::inclusive(PhysAddr::new(u64::MAX), PhysAddr::new(u64::MAX)).unwrap();
        let (all, top) = (WithheldRun::pages(&all), WithheldRun::pages(&top));
        let mut withheld = Withheld::default();
        withheld.add(all);
        assert!(withheld.any(&top) && withheld.any(&run(0, 0)));
        withheld.add(top);
        withheld.remove(all);
        assert!(withheld.any(&top) && withheld.any(&all) && !withheld.any(&run(0, 9)));
        withheld.remove(top);
        assert!(withheld.edges.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 500,
            rng_seed: prop::test_runner::RngSeed::Fixed(64),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn agrees_with_a_count_of_every_page(
            steps in prop::collection::vec(
                (
                    0..40_u64,
                    0..9_u64,
                    any::<prop::sample::Index>(),
                    any::<bool>(),
                ),
                1..60,
            ),
        ) {
            let mut withheld = Withheld::default();
            let mut counts = [0_u32; 64];
            let mut inside: Vec<(u64, u64)> = Vec::new();
            for (first, more, which, take) in steps {
                if take && !inside.is_empty() {
                    let (first, last) = inside.swap_remove(which.index(inside.len()));
                    withheld.remove(run(first, last));
                    for page in first..=last {
                        counts[page as usize] -= 1;
                    }
                } else {
                    inside.push((first, first + more));
                    withheld.add(run(first, first + more));
                    for page in first..=first + more {
                        counts[page as usize] += 1;
                    }
                }
                for page in 0..60 {
                    prop_assert_eq!(withheld.any(&run(page, page)), counts[page as usize] > 0);
                    let three = &counts[page as usize..page as usize + 3];
                    prop_assert_eq!(
                        withheld.any(&run(page, page + 2)),
                        three.iter().any(|n| *n > 0)
                    );
                }
                prop_assert!(withheld.edges.len() <= 2 * inside.len());
            }
        }
    }
}
