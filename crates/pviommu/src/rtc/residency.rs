//! X24: how long released mappings stay, on a virtual clock.

use alloc::vec::Vec;

use ringfence_types::{Direction, Iova, PhysAddr};

use super::{Cache, Key};

/// What was seen of a cache with cycles of `cycle` units of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Residency {
    /// For each mapping that left, the time from its last release to its expiry; sorted.
    pub stays: Vec<u64>,
    /// Ends of cycles at which mappings left: the requests that were needed.
    pub batches: u64,
    /// Mappings that were in use when their C cycles were over, and were there at the end.
    pub survivors: u64,
}

/// Releases a mapping in every unit of time for `releases` units, and lets all of them expire. Every seventh one is used again after one and a half
/// cycles and released two cycles later. Another one for each of `held` stays in use throughout, released once and taken again.
///
/// At one instant releases come before the end of a cycle, so that one released at a cycle's last instant belongs to it.
pub fn residency(cache: &mut impl Cache, cycle: u64, releases: u64, held: u64) -> Residency {
    let key = |page: u64| Key::new(PhysAddr::new(page << 12), 1, Direction::ToDevice);
    let mut seen = Residency {
        stays: Vec::new(),
        batches: 0,
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
        cache.take(key);
    }
    let (again, after) = (cycle + cycle / 2, 3 * cycle + cycle / 2);
    let (mut now, mut left) = (0_u64, 0);
    let end = releases.saturating_add(cycle.saturating_mul(300));
    while left < releases && now < end {
        now += 1;
        let reused = |number: &u64| number.is_multiple_of(7);
        let number = |age: u64| {
            (now - 1)
                .checked_sub(age)
                .filter(|number| *number < releases)
        };
        for number in [number(0), number(after).filter(reused)] {
            if let Some(key) = number.and_then(key) {
                let _ = cache.release(key);
            }
        }
        if let Some(key) = number(again).filter(reused).and_then(key) {
            cache.take(key);
        }
        if now % cycle == 0 {
            let mut batch = false;
            cache.tick(|key, _| {
                let number = key.first().get() >> 12;
                let released = number + 1 + if reused(&number) { after } else { 0 };
                seen.stays.push(now.saturating_sub(released));
                (left, batch) = (left + 1, true);
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
