//! Counts the steps of allocator searches and enforces their limit.

use ringfence_types::IovaRange;

use crate::error::LabError;
use crate::limits::ReplayLimits;

/// A map tries addresses below 4 GiB first.
const LOW: u64 = 1 << 32;

/// Number of ranges that the searches visited. A failed search reports no steps, so it counts as
/// one step for each mapped or kept range.
#[derive(Debug, Default)]
pub(super) struct Search {
    steps: u64,
    /// Ranges mapped since the start.
    ranges: u64,
    /// Ranges mapped now.
    live: u64,
}

impl Search {
    /// Counts a map of `placed` that took `steps` steps while a cache kept `kept` mappings.
    #[inline]
    pub(super) fn mapped(
        &mut self,
        placed: &[IovaRange],
        steps: u32,
        kept: usize,
        limits: &ReplayLimits,
    ) -> Result<(), LabError> {
        let before = self.live;
        self.live += placed.len() as u64;
        self.ranges += placed.len() as u64;
        self.steps = self.steps.saturating_add(u64::from(steps));
        if steps > 0 {
            let above = placed.iter().filter(|range| range.last().get() >= LOW);
            self.fail(above.count() as u64, before, kept);
        }
        self.check(limits)
    }

    /// Counts a refused map.
    #[cold]
    pub(super) fn refused(&mut self, kept: usize, limits: &ReplayLimits) -> Result<(), LabError> {
        self.ranges += 1;
        self.fail(2, self.live, kept);
        self.check(limits)
    }

    /// Counts an unmap that released or kept `ranges` ranges.
    #[inline]
    pub(super) fn unmapped(&mut self, ranges: usize) {
        self.live = self.live.saturating_sub(ranges as u64);
    }

    #[inline]
    fn fail(&mut self, searches: u64, live: u64, kept: usize) {
        let each = live.saturating_add(kept as u64);
        self.steps = self.steps.saturating_add(searches.saturating_mul(each));
    }

    #[inline]
    fn check(&self, limits: &ReplayLimits) -> Result<(), LabError> {
        let limit = limits.search_of(self.ranges);
        match self.steps > limit {
            true => Err(LabError::LongSearch { limit }),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use ringfence_types::Iova;

    use super::*;

    fn page(at: u64) -> IovaRange {
        IovaRange::new(Iova::new(at), 4096).unwrap()
    }

    #[test]
    fn failed_searches_count_mapped_and_cached_ranges() {
        let limits = ReplayLimits::default();
        let mut search = Search::default();
        search.mapped(&[page(4096); 10], 7, 1, &limits).unwrap();
        assert_eq!((search.steps, search.ranges, search.live), (7, 10, 10));
        // An address above 4 GiB implies a failed search below. Without steps there was no search.
        search.mapped(&[page(LOW)], 1, 5, &limits).unwrap();
        search.mapped(&[page(LOW)], 0, 5, &limits).unwrap();
        assert_eq!((search.steps, search.live), (7 + 1 + 15, 12));
        search.unmapped(2);
        search.refused(5, &limits).unwrap();
        assert_eq!((search.steps, search.live), (23 + 30, 10));
    }

    #[test]
    fn the_default_bound_grows_with_the_ranges() {
        let limits = ReplayLimits::default();
        let mut search = Search::default();
        search.mapped(&[page(4096)], 0, 0, &limits).unwrap();
        search.steps = (1 << 28) + 2 * 4096;
        assert!(search.mapped(&[page(8192)], 0, 0, &limits).is_ok());
        let over = search.mapped(&[page(LOW)], 4097, 0, &limits);
        let limit = (1 << 28) + 3 * 4096;
        assert!(matches!(over, Err(LabError::LongSearch { limit: l }) if l == limit));
    }
}
