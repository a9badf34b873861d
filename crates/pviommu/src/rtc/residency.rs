//! X24: how long released mappings stay, on a virtual clock.

use alloc::vec::Vec;

use ringfence_types::{Direction, Iova, PhysAddr};

use super::{MappingKey, ReverseCache};

/// When mappings are released, in units of time: one in each unit. Every seventh one is used again,
/// and released for the last time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uses {
    /// Mappings, and the units in which they are released.
    pub releases: u64,
    /// Others that stay in use throughout, released once and taken again.
    pub held: u64,
    /// From the first release to the next use.
    pub again: u64,
    /// From the first release to the last one, not less.
    pub after: u64,
}

impl Uses {
    /// Uses again after one and a half cycles of `cycle` units, releases two cycles later.
    pub const fn in_cycles(cycle: u64, releases: u64, held: u64) -> Self {
        let again = cycle.saturating_add(cycle / 2);
        Self {
            releases,
            held,
            again,
            after: again.saturating_add(cycle).saturating_add(cycle),
        }
    }
}

/// What was seen of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Residency {
    /// For each mapping that left, as often as it did, the time from its last release to its
    /// expiry; sorted.
    pub stays: Vec<u64>,
    /// Ends of cycles at which mappings left: the requests that were needed.
    pub batches: u64,
    /// Later uses that found their mapping; the others had to map anew.
    pub hits: u64,
    /// Mappings that were in use when their C cycles were over, and were there at the end.
    pub survivors: u64,
}

/// Uses a cache whose cycles have `cycle` units of time, and lets all expire.
///
/// At one instant releases come before the end of a cycle, so that one released at a cycle's last
/// instant belongs to it.
pub fn residency(cache: &mut impl ReverseCache, cycle: u64, uses: Uses) -> Residency {
    let Uses {
        releases,
        held,
        again,
        after,
    } = uses;
    let key = |page: u64| MappingKey::new(PhysAddr::new(page << 12), 1, Direction::ToDevice);
    let mut seen = Residency {
        stays: Vec::new(),
        batches: 0,
        hits: 0,
        survivors: 0,
    };
    let cycle = cycle.max(1);
    // Mappings number 0 to `releases` - 1, then those that are held.
    for key in (0..releases.saturating_add(held)).filter_map(key) {
        if cache.insert(key, Iova::new(key.first().get())).is_err() {
            return seen;
        }
    }
    for key in (releases..releases.saturating_add(held)).filter_map(key) {
        let _ = cache.release(key);
        cache.acquire(key);
    }
    let mut released = alloc::vec![0_u64; usize::try_from(releases).unwrap_or(0)];
    let (mut now, mut there) = (0_u64, releases);
    let used = releases.saturating_add(after);
    // What a cache loses never leaves.
    let end = used.saturating_add(cycle.saturating_mul(300));
    while now < used || (there > 0 && now < end) {
        now += 1;
        let number = |age: u64| {
            let number = (now - 1).checked_sub(age);
            number.filter(|number| *number < releases)
        };
        let reused = |age| number(age).filter(|number| number.is_multiple_of(7));
        for number in [number(0), reused(after)].into_iter().flatten() {
            let done = key(number).is_some_and(|key| cache.release(key).is_ok());
            if done && let Some(at) = released.get_mut(number as usize) {
                *at = now;
            }
        }
        if let Some(key) = reused(again).and_then(key) {
            if cache.acquire(key).is_some() {
                seen.hits += 1;
            } else if cache.insert(key, Iova::new(key.first().get())).is_ok() {
                there += 1;
            }
        }
        if now.is_multiple_of(cycle) {
            let mut batch = false;
            cache.tick(|key, _| {
                let number = usize::try_from(key.first().get() >> 12).ok();
                let released = number.and_then(|number| released.get(number));
                let stay = now.saturating_sub(released.copied().unwrap_or(now));
                seen.stays.push(stay);
                (there, batch) = (there.saturating_sub(1), true);
            });
            seen.batches += u64::from(batch);
        }
    }
    for key in (releases..releases.saturating_add(held)).filter_map(key) {
        // It still has its user, whose release is one.
        seen.survivors += u64::from(cache.release(key).is_ok());
    }
    seen.stays.sort_unstable();
    seen
}
