//! Misses under way, and invalidations that arrived meanwhile.
//!
//! Everything has a number in the order in which it happened. An invalidation matters to updates
//! for as long as a miss is under way that was sent before it: its answer may have been looked up
//! before the invalidation, and arrive after it.

use ringfence_types::{Iova, IovaRange, PageSize, Permissions};

const PAGE: PageSize = PageSize::Size4K;

/// Invalidations that are remembered one by one; more become one that covers them all.
const REMEMBERED: usize = 32;

/// A miss under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MissId(u64);

/// What [`Iotlb::miss`](super::Iotlb::miss) asks its caller to do. Whoever is told to wait holds no
/// pin meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissAction {
    /// Send this to the front-end, with a request for a reply; then wait.
    Send(MissId, super::Message),
    /// Wait: the same was asked before.
    Wait(MissId),
    /// The translation has arrived in the meantime: try again.
    Present,
}

/// What became of a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissOutcome {
    /// The translation is there: try again.
    Present,
    /// There was an answer, and it is gone, or came too late to be believed: try again, and expect
    /// another miss.
    Invalidated,
    /// The device may not access the address.
    Refused,
}

#[derive(Debug, Clone, Copy)]
struct Miss {
    id: MissId,
    page: u64,
    wanted: Permissions,
}

#[derive(Debug, Clone, Copy)]
struct RecentInvalidation {
    number: u64,
    range: IovaRange,
}

/// What is under way.
#[derive(Debug, Default)]
pub(super) struct Misses {
    misses: Vec<Miss>,
    invalidations: Vec<RecentInvalidation>,
    number: u64,
}

impl Misses {
    /// The miss of `page` that asks for all of `wanted`, if one is under way that no invalidation
    /// has overtaken.
    pub(super) fn find(&self, page: u64, wanted: Permissions) -> Option<MissId> {
        let miss = self.misses.iter().find(|miss| {
            miss.page == page
                && miss.wanted.union(wanted) == miss.wanted
                && !self.is_doubtful_for(miss.id.0, page)
        });
        miss.map(|miss| miss.id)
    }

    pub(super) fn len(&self) -> usize {
        self.misses.len()
    }

    pub(super) fn add(&mut self, page: u64, wanted: Permissions) -> MissId {
        let id = MissId(self.next());
        self.misses.push(Miss { id, page, wanted });
        id
    }

    /// The miss is over: its page, and what was wanted there.
    pub(super) fn remove(&mut self, id: MissId) -> Option<(u64, Permissions)> {
        let at = self.misses.iter().position(|miss| miss.id == id)?;
        let miss = self.misses.swap_remove(at);
        let oldest = self.misses.iter().map(|miss| miss.id.0).min();
        self.invalidations
            .retain(|invalidation| oldest.is_some_and(|oldest| oldest < invalidation.number));
        Some((miss.page, miss.wanted))
    }

    /// What the miss is about, while it is under way.
    pub(super) fn get(&self, id: MissId) -> Option<(u64, Permissions)> {
        let miss = self.misses.iter().find(|miss| miss.id == id)?;
        Some((miss.page, miss.wanted))
    }

    /// What the oldest miss in `first..=last` wants that no invalidation has overtaken and that
    /// `has` does not say is there: the one that an update of these pages answers, if the front-end
    /// takes misses in their order.
    pub(super) fn answered(
        &self,
        first: u64,
        last: u64,
        has: impl Fn(u64, Permissions) -> bool,
    ) -> Option<Permissions> {
        let misses = self.misses.iter().filter(|miss| {
            (first..=last).contains(&miss.page)
                && !has(miss.page, miss.wanted)
                && !self.is_doubtful_for(miss.id.0, miss.page)
        });
        misses.min_by_key(|miss| miss.id.0).map(|miss| miss.wanted)
    }

    /// The pages that are missed, in `first..=last`.
    pub(super) fn pages(&self, first: u64, last: u64) -> impl Iterator<Item = u64> {
        self.misses
            .iter()
            .map(|miss| miss.page)
            .filter(move |page| (first..=last).contains(page))
    }

    /// `range` was invalidated.
    pub(super) fn invalidated(&mut self, range: IovaRange) {
        if self.misses.is_empty() {
            return;
        }
        let number = self.next();
        if self.invalidations.len() < REMEMBERED {
            self.invalidations
                .push(RecentInvalidation { number, range });
            return;
        }
        let hull = self.invalidations.iter().fold(range, |hull, other| {
            let start = hull.start().min(other.range.start());
            let last = hull.last().max(other.range.last());
            IovaRange::inclusive(start, last).unwrap_or(hull)
        });
        self.invalidations.clear();
        self.invalidations.push(RecentInvalidation {
            number,
            range: hull,
        });
    }

    /// Whether an update of `page` may have been looked up before an invalidation.
    pub(super) fn is_doubtful(&self, page: u64) -> bool {
        self.is_doubtful_for(0, page)
    }

    fn is_doubtful_for(&self, sent: u64, page: u64) -> bool {
        let address = Iova::new(page << PAGE.shift());
        self.invalidations.iter().any(|invalidation| {
            invalidation.number > sent && invalidation.range.contains_address(address)
        })
    }

    fn next(&mut self) -> u64 {
        self.number = self.number.wrapping_add(1);
        self.number
    }
}
