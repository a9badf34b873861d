//! The brute-force reference: the set of reserved pages, and the results it permits to any
//! allocator.

use std::collections::{BTreeMap, BTreeSet};

use ringfence_iova::{AllocError, AllocRequest, Allocation};
use ringfence_types::PfnRange;

use super::common::pages;

/// Permitted deviations from "exactly the requested pages, found whenever they exist".
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// Up to this order, a range reserves the next power of two of pages. `None` if a range
    /// reserves exactly its pages.
    pub(crate) rounds_up_to: Option<u32>,
    /// True if rounded reservations are naturally aligned.
    pub(crate) natural: bool,
    /// True if ranges that are not rounded are aligned to the next power of two.
    pub(crate) natural_when_exact: bool,
    /// True if the whole reservation must lie at or below the limit, not only the requested pages.
    pub(crate) reservation_within_limit: bool,
    /// True if `find` returns every allocated range.
    pub(crate) finds: bool,
    /// True if freed pages are withheld until the domain is flushed.
    pub(crate) quarantines: bool,
    /// True if the allocator requests flushes.
    pub(crate) flushes: bool,
    /// True if an aligned range needs a gap in which every start has an aligned range behind it.
    pub(crate) needs_room_to_align: bool,
    /// Pages that stay unused on each side of a range.
    pub(crate) guard: u64,
    /// True if release builds also reject ranges that are not allocated.
    pub(crate) always_refuses: bool,
}

impl Rules {
    pub(crate) const EXACT: Self = Self {
        rounds_up_to: None,
        natural: false,
        natural_when_exact: false,
        reservation_within_limit: false,
        finds: true,
        quarantines: false,
        flushes: false,
        needs_room_to_align: false,
        guard: 0,
        always_refuses: true,
    };

    /// Returns the number of pages that a range of `count` pages reserves, and its alignment order.
    fn reserved(&self, count: u64) -> (u64, u32) {
        let order = count.next_power_of_two().trailing_zeros();
        match self.rounds_up_to {
            Some(most) if order <= most => (1 << order, if self.natural { order } else { 0 }),
            _ => (count, if self.natural_when_exact { order } else { 0 }),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Reference {
    rules: Rules,
    space: PfnRange,
    live: BTreeMap<u64, PfnRange>,
    taken: BTreeSet<u64>,
    quarantine: BTreeSet<u64>,
}

impl Reference {
    pub(crate) fn new(space: PfnRange, rules: Rules) -> Self {
        Self {
            rules,
            space,
            live: BTreeMap::new(),
            taken: BTreeSet::new(),
            quarantine: BTreeSet::new(),
        }
    }

    pub(crate) fn live(&self) -> Vec<PfnRange> {
        self.live.values().copied().collect()
    }

    fn reservation(&self, range: PfnRange) -> std::ops::RangeInclusive<u64> {
        let lo = range.lo().get();
        lo..=lo + self.rules.reserved(range.pages()).0 - 1
    }

    /// Checks a successful allocation.
    pub(crate) fn allocated(&mut self, request: &AllocRequest, found: &Allocation) {
        let range = found.range;
        let lo = range.lo().get();
        assert_eq!(range.pages(), request.pages, "exactly the pages asked for");
        assert!(range.hi() <= request.limit, "{range} passes the limit");
        assert_eq!(
            lo & ((1 << request.align_order) - 1),
            0,
            "{range} is not aligned"
        );
        for page in self.reservation(range) {
            assert!(
                self.space.contains(&pages(page, page)),
                "{range} leaves the space"
            );
            assert!(self.taken.insert(page), "{range} overlaps at {page:#x}");
            assert!(
                !self.quarantine.contains(&page),
                "{page:#x} reused before a flush"
            );
        }
        self.live.insert(lo, range);
    }

    /// Checks an exhaustion: no range may fit.
    pub(crate) fn exhausted(&self, request: &AllocRequest, error: AllocError) {
        assert_eq!(
            error,
            AllocError::Exhausted {
                pages: request.pages,
                limit: request.limit
            }
        );
        let (count, order) = self.rules.reserved(request.pages);
        let align = 1_u64 << order.max(u32::from(request.align_order));
        let room = if self.rules.needs_room_to_align {
            align - 1
        } else {
            0
        };
        let (count, step) = (count + room, if room > 0 { 1 } else { align });
        let within = if self.rules.reservation_within_limit {
            count
        } else {
            request.pages + room
        };
        let mut lo = self.space.lo().get().next_multiple_of(step);
        while lo + count - 1 <= self.space.hi().get() && lo + within - 1 <= request.limit.get() {
            let guard = self.rules.guard;
            let around = lo.saturating_sub(guard)..(lo + count).saturating_add(guard);
            let outside = lo < self.space.lo().get() + guard
                || lo + count + guard - 1 > self.space.hi().get();
            assert!(
                outside || around.clone().any(|page| self.taken.contains(&page)),
                "{request:?} refused, and yet {count} pages are free at {lo:#x}"
            );
            lo += step;
        }
    }

    pub(crate) fn freed(&mut self, range: PfnRange) {
        assert_eq!(self.live.remove(&range.lo().get()), Some(range));
        for page in self.reservation(range) {
            assert!(self.taken.remove(&page));
            if self.rules.quarantines {
                self.quarantine.insert(page);
            }
        }
    }

    pub(crate) fn flushed(&mut self) {
        self.quarantine.clear();
    }

    /// Checks the result of `find`.
    pub(crate) fn found(&self, page: u64, answer: Option<PfnRange>) {
        let owner = self
            .live
            .values()
            .find(|range| self.reservation(**range).contains(&page));
        match (owner, answer) {
            (Some(range), Some(answer)) => {
                let reserved = self.reservation(*range);
                assert_eq!(
                    answer,
                    pages(*reserved.start(), *reserved.end()),
                    "find({page:#x})"
                );
            }
            (Some(range), None) => {
                assert!(!self.rules.finds, "find({page:#x}) does not see {range}")
            }
            (None, Some(answer)) => {
                assert!(
                    answer.contains(&pages(page, page)),
                    "find({page:#x}) = {answer}"
                );
                assert!(self.live.values().all(|range| !answer.overlaps(range)));
            }
            (None, None) => {}
        }
    }
}
