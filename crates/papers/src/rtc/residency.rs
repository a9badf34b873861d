//! X24: residency of released mappings, on a virtual clock.

use alloc::vec::Vec;

use ringfence_types::{Direction, Iova, PhysAddr};

use ringfence_pviommu::rtc::{MappingKey, ReverseCache};

/// Schedule of releases, in units of time: one mapping in each unit. Every seventh mapping is used
/// again and then released for the last time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uses {
    /// Number of mappings, and of units in which they are released.
    pub releases: u64,
    /// Further mappings that stay in use, after one release and reuse at the start.
    pub held: u64,
    /// Time from the first release to the next use.
    pub again: u64,
    /// Time from the first release to the last one; at least `again`.
    pub after: u64,
}

impl Uses {
    /// Creates a schedule: reuse after one and a half cycles of `cycle` units, last release two
    /// cycles later.
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

/// Measurements of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Residency {
    /// Times from the last release of a mapping to its expiry, one for each expiry; sorted.
    pub stays: Vec<u64>,
    /// Ends of cycles at which mappings left, which is the number of unmap requests.
    pub batches: u64,
    /// Reuses that found their mapping. The others had to map again.
    pub hits: u64,
    /// Held mappings that were still cached at the end, after their C cycles were over.
    pub survivors: u64,
}

/// Runs `uses` on a cache with cycles of `cycle` units, until all mappings expire.
///
/// At one instant, releases precede the end of a cycle: a mapping released at the last instant of a
/// cycle belongs to it.
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
    // Mappings 0 to `releases` - 1, then the held ones.
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
    // A mapping that the cache loses never leaves: bound the loop.
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
        // A mapping in use has a user, so its release succeeds.
        seen.survivors += u64::from(cache.release(key).is_ok());
    }
    seen.stays.sort_unstable();
    seen
}
