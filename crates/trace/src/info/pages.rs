//! Counts the pages named and how often each was named.

use ringfence_types::{PageSize, PhysAddr, PhysRange};
use rustc_hash::FxHashMap;

use super::{Histogram, Pages, bucket};
use crate::runs::Runs;

/// Longest range whose pages are stored one by one; longer ranges are stored by their ends. A line
/// therefore costs no more memory than this many pages, whatever size it claims.
const ONE_BY_ONE: u64 = 512;

/// A set of pages, and the number of times that pages were named.
#[derive(Debug, Default)]
pub(super) struct PageSet {
    /// Single pages, with the number of times that each was named.
    seen: FxHashMap<u64, u32>,
    long: Runs,
    touches: u64,
}

impl PageSet {
    pub(super) fn add(&mut self, range: PhysRange) {
        let shift = PageSize::Size4K.shift();
        let (first, last) = (range.start().get() >> shift, range.last().get() >> shift);
        let pages = last - first + 1;
        self.touches = self.touches.saturating_add(pages);
        match pages <= ONE_BY_ONE {
            true => {
                for page in first..=last {
                    let touches = self.seen.entry(page).or_default();
                    *touches = touches.saturating_add(1);
                }
            }
            false => self.long.add(first, last + 1),
        }
    }

    pub(super) fn extend_by(&mut self, start: u64, size: u64) {
        if let Some(range) = PhysRange::new(PhysAddr::new(start), size) {
            self.add(range);
        }
    }

    pub(super) fn counts(&self) -> Pages {
        let short = |page: &&u64| !self.long.contains(**page);
        let short = match self.long.is_empty() {
            true => self.seen.len(),
            false => self.seen.keys().filter(short).count(),
        };
        let mut by_touches = Histogram::default();
        for touches in self.seen.values() {
            by_touches[bucket(u64::from(*touches))] += 1;
        }
        Pages {
            by_touches,
            distinct: self.long.pages().saturating_add(short as u64),
            touches: self.touches,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_ranges_and_single_pages_are_one_set() {
        const PAGE: u64 = 4096;
        let mut set = PageSet::default();
        let mut model = std::collections::HashSet::new();
        let mut touches = 0;
        let mut random = 1u64;
        for _ in 0..300 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let (start, pages) = (random >> 40 & 0x3fff, random >> 20 & 0x3ff);
            set.extend_by(start * PAGE, (pages + 1) * PAGE);
            model.extend(start..=start + pages);
            touches += pages + 1;
        }
        let counts = set.counts();
        assert_eq!(
            (counts.distinct, counts.touches),
            (model.len() as u64, touches)
        );
    }

    #[test]
    fn a_line_costs_bounded_memory() {
        let mut set = PageSet::default();
        for n in 0..1000 {
            set.extend_by(n << 36, 1 << 36);
        }
        assert!(set.seen.is_empty());
        assert_eq!(set.counts().distinct, 1000 << 24);
    }
}
