//! Pending misses, and invalidations that arrived while they were pending.
//!
//! Misses and invalidations are numbered in the order of their arrival. An invalidation affects
//! updates while a miss that was sent before it is pending. The front-end may have looked up the
//! answer before the invalidation and may send it afterwards.

use ringfence_types::{Iova, IovaRange, PageSize, Permissions};

const PAGE: PageSize = PageSize::Size4K;

/// Maximum number of separate invalidations. Further ones are merged into a single covering range.
const REMEMBERED: usize = 32;

/// Identifies a pending miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MissId(u64);

/// Action that [`Iotlb::miss`](super::Iotlb::miss) requests from its caller. While it waits, the
/// caller must not hold a guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissAction {
    /// Send the message to the front-end with a request for a reply, then wait.
    Send(MissId, super::Message),
    /// Wait: the same miss is already pending.
    Wait(MissId),
    /// The translation has arrived: retry the access.
    Present,
}

/// Outcome of a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissOutcome {
    /// The translation is cached: retry the access.
    Present,
    /// An answer arrived but was invalidated, or arrived too late to be trusted. Retry the access,
    /// which may miss again.
    Invalidated,
    /// The device may not access the address.
    Refused,
}

#[derive(Debug, Clone, Copy)]
struct Miss {
    id: MissId,
    page: u64,
    required: Permissions,
}

#[derive(Debug, Clone, Copy)]
struct RecentInvalidation {
    number: u64,
    range: IovaRange,
}

/// Pending misses and the invalidations that affect them.
#[derive(Debug, Default)]
pub(super) struct Misses {
    /// The oldest miss is first.
    misses: Vec<Miss>,
    invalidations: Vec<RecentInvalidation>,
    number: u64,
}

impl Misses {
    /// Returns a pending miss of `page` that requests all of `required` and that no later
    /// invalidation affects.
    pub(super) fn find(&self, page: u64, required: Permissions) -> Option<MissId> {
        let miss = self.misses.iter().find(|miss| {
            miss.page == page
                && miss.required.contains(required)
                && !self.is_doubtful_for(miss.id.0, page)
        });
        miss.map(|miss| miss.id)
    }

    pub(super) fn len(&self) -> usize {
        self.misses.len()
    }

    pub(super) fn add(&mut self, page: u64, required: Permissions) -> MissId {
        let id = MissId(self.next());
        self.misses.push(Miss { id, page, required });
        id
    }

    /// Removes a completed miss. Returns its page and the requested permissions.
    pub(super) fn remove(&mut self, id: MissId) -> Option<(u64, Permissions)> {
        let index = self.misses.iter().position(|miss| miss.id == id)?;
        let miss = self.misses.remove(index);
        let oldest = self.misses.iter().map(|miss| miss.id.0).min();
        self.invalidations
            .retain(|invalidation| oldest.is_some_and(|oldest| oldest < invalidation.number));
        Some((miss.page, miss.required))
    }

    /// Returns the page and the requested permissions of a pending miss.
    pub(super) fn get(&self, id: MissId) -> Option<(u64, Permissions)> {
        let miss = self.misses.iter().find(|miss| miss.id == id)?;
        Some((miss.page, miss.required))
    }

    /// Returns the permissions requested by the oldest unanswered miss in `first..=last`. Skips
    /// misses for which `has` returns true, and prefers misses that no later invalidation affects.
    /// If the front-end serves misses in order, an update of these pages answers this miss. It may
    /// also be the late answer to a miss that an invalidation affects.
    pub(super) fn answered(
        &self,
        first: u64,
        last: u64,
        has: impl Fn(u64, Permissions) -> bool,
    ) -> Option<Permissions> {
        let oldest = |doubtful: bool| {
            let misses = self.misses.iter().filter(|miss| {
                (first..=last).contains(&miss.page)
                    && !has(miss.page, miss.required)
                    && self.is_doubtful_for(miss.id.0, miss.page) == doubtful
            });
            misses.min_by_key(|miss| miss.id.0)
        };
        oldest(false)
            .or_else(|| oldest(true))
            .map(|miss| miss.required)
    }

    /// Returns the pages of pending misses in `first..=last`, oldest miss first.
    pub(super) fn pages(&self, first: u64, last: u64) -> impl Iterator<Item = u64> {
        self.misses
            .iter()
            .map(|miss| miss.page)
            .filter(move |page| (first..=last).contains(page))
    }

    /// Returns the page and the requested permissions of each pending miss.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, Permissions)> {
        self.misses.iter().map(|miss| (miss.page, miss.required))
    }

    /// Returns the page and the requested permissions of each miss that is older than all misses of
    /// `page`.
    pub(super) fn before(&self, page: u64) -> impl Iterator<Item = (u64, Permissions)> {
        let older = self.misses.iter().take_while(move |miss| miss.page != page);
        older.map(|miss| (miss.page, miss.required))
    }

    /// Records the invalidation of `range`.
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

    /// Returns true if an update of `page` may have been looked up before an invalidation.
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
