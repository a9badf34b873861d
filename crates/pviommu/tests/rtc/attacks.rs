//! Mappings of another direction or length, and mappings in use that expire: attacks on the
//! as-published and the fixed caches, and the residency of mappings.

use ringfence_papers::rtc::residency::{ReleaseSchedule, residency};
use ringfence_papers::rtc::{Rtc, RtcAsPublished};
use ringfence_pviommu::rtc::{Cycles, FlatCache, ResidencyPolicy, ReverseCache};
use ringfence_types::{Direction, Iova};

use crate::cases::*;

#[test]
fn attacks_succeed_on_the_cache_as_published_only() {
    type Attack<C> = fn(&mut C) -> bool;
    fn outcomes<C: ReverseCache>(make: impl Fn() -> C) -> [bool; 3] {
        let attacks: [Attack<C>; 3] = [
            direction_is_confused,
            range_is_confused,
            mapping_in_use_expires,
        ];
        attacks.map(|attack| attack(&mut make()))
    }
    let c = Cycles::PAPER;
    assert_eq!(outcomes(|| RtcAsPublished::new(c, 100)), [true; 3]);
    assert_eq!(outcomes(|| Rtc::new(c, 100)), [false; 3]);
    assert_eq!(
        outcomes(|| FlatCache::new(c, 100, ResidencyPolicy::Fixed)),
        [false; 3]
    );
    let adaptive = ResidencyPolicy::Adaptive { late: 10 };
    assert_eq!(outcomes(|| FlatCache::new(c, 100, adaptive)), [false; 3]);
}

/// In the as-published queue, the first element of a mapping decides. A reused mapping leaves with
/// it.
#[test]
fn reuse_shortens_the_residency_as_published() {
    fn cycles_after_last_release(cache: &mut impl ReverseCache) -> u32 {
        let key = key(1, 1, Direction::ToDevice);
        cache.insert(key, GIOVA).unwrap();
        cache.release(key).unwrap();
        for _ in 0..3 {
            cache.tick(|_, _| panic!("too early"));
        }
        cache.acquire(key).unwrap();
        cache.release(key).unwrap();
        let mut ticks = 0;
        let mut evicted = false;
        while !evicted {
            ticks += 1;
            cache.tick(|_, _| evicted = true);
        }
        ticks
    }
    let c = Cycles::PAPER;
    assert_eq!(
        cycles_after_last_release(&mut RtcAsPublished::new(c, 100)),
        1
    );
    assert_eq!(cycles_after_last_release(&mut Rtc::new(c, 100)), 4);
    assert_eq!(
        cycles_after_last_release(&mut FlatCache::new(c, 100, ResidencyPolicy::Fixed)),
        4
    );
}

/// The as-published queue has an element for every release.
#[test]
fn queue_as_published_grows_with_each_reuse() {
    let mut as_published = RtcAsPublished::new(Cycles::PAPER, 100);
    let key = key(1, 1, Direction::ToDevice);
    as_published.insert(key, GIOVA).unwrap();
    as_published.release(key).unwrap();
    for _ in 0..5761 {
        as_published.acquire(key).unwrap();
        as_published.release(key).unwrap();
    }
    assert_eq!(as_published.queued(), 5762);
}

/// A mapping that is in use when its element reaches the head of the as-published queue leaves the
/// queue, but not the tree.
#[test]
fn a_mapping_in_use_leaves_the_published_queue_only() {
    let mut as_published = RtcAsPublished::new(Cycles::PAPER, 100);
    let key = key(1, 1, Direction::ToDevice);
    as_published.insert(key, GIOVA).unwrap();
    as_published.release(key).unwrap();
    assert_eq!(as_published.acquire(key), Some(GIOVA));
    for _ in 0..8 {
        as_published.tick(|key, _| panic!("{key} is in use"));
    }
    assert_eq!(as_published.queued(), 3, "separators only");
    assert_eq!(as_published.acquire(key), Some(GIOVA));
}

/// With more than 32 pages of one MiB in use, the as-published cache loses one, and its mapping is
/// never unmapped.
#[test]
fn cache_as_published_loses_mappings() {
    fn left_after_all_expired(cache: &mut impl ReverseCache) -> u64 {
        for page in 0..40 {
            let key = key(page, 1, Direction::ToDevice);
            cache.insert(key, Iova::new((page + 1) << 12)).unwrap();
        }
        for page in 0..40 {
            let _ = cache.release(key(page, 1, Direction::ToDevice));
        }
        let mut evicted = 0;
        for _ in 0..8 {
            cache.tick(|_, _| evicted += 1);
        }
        40 - evicted
    }
    let c = Cycles::PAPER;
    assert!(left_after_all_expired(&mut RtcAsPublished::new(c, 100)) > 0);
    assert_eq!(left_after_all_expired(&mut Rtc::new(c, 100)), 0);
    assert_eq!(
        left_after_all_expired(&mut FlatCache::new(c, 100, ResidencyPolicy::Fixed)),
        0
    );
}

/// The adaptive table adapts its residency to the reuse interval, and learns from early evictions.
#[test]
fn residency_follows_reuse() {
    let c = Cycles::new(100).unwrap();
    let mut cache = FlatCache::new(c, 1000, ResidencyPolicy::Adaptive { late: 10 });
    let hot = key(1, 1, Direction::ToDevice);
    let idle = key(2, 1, Direction::ToDevice);
    let other = key(3, 1, Direction::FromDevice);
    for key in [hot, idle, other] {
        cache.insert(key, GIOVA).unwrap();
        cache.release(key).unwrap();
    }
    for _ in 0..50 {
        cache.acquire(hot).unwrap();
        cache.release(hot).unwrap();
    }
    let mut evicted = Vec::new();
    cache.tick(|key, _| evicted.push(key));
    evicted.sort();
    assert_eq!(
        evicted,
        [hot, idle],
        "of a direction that is always used again at once"
    );
    for _ in 0..6 {
        cache.tick(|key, _| panic!("{key} is of a direction of which nothing is known"));
    }
    cache.tick(|key, _| assert_eq!(key, other));
    // From now on the reuse interval is two cycles: first misses, then hits.
    let mut hits = 0;
    for round in 0..60 {
        match cache.acquire(hot) {
            Some(_) => hits += 1,
            None => cache.insert(hot, GIOVA).unwrap(),
        }
        assert!(hits == 0 || hits + 30 > round);
        cache.release(hot).unwrap();
        cache.tick(|_, _| {});
        cache.tick(|_, _| {});
    }
    assert!(hits > 50, "{hits}");
}

/// X24: 30 s to less than 40 s with T = 10 s and C = 3, at a resolution of 10 ms, evenly spread.
/// One batch per cycle; mappings in use survive.
#[test]
fn mappings_stay_from_30_to_less_than_40_seconds() {
    const SECOND: u64 = 100;
    fn check(name: &str, cache: &mut impl ReverseCache) {
        let releases = 60 * SECOND;
        let cycle = Cycles::PAPER_SECONDS * SECOND;
        let seen = residency(cache, cycle, ReleaseSchedule::in_cycles(cycle, releases, 5)).unwrap();
        assert_eq!(seen.stays.len() as u64, releases, "{name}");
        assert_eq!(seen.stays.first(), Some(&(30 * SECOND)), "{name}");
        assert_eq!(seen.stays.last(), Some(&(40 * SECOND - 1)), "{name}");
        for second in 30..40 {
            let within = |stay: &&u64| (second * SECOND..(second + 1) * SECOND).contains(*stay);
            let count = seen.stays.iter().filter(within).count();
            assert!((595..=605).contains(&count), "{name}, {second} s: {count}");
        }
        // Six cycles of releases, and three and a half for the reused mappings.
        assert_eq!((seen.batches, seen.survivors), (10, 5), "{name}");
        assert_eq!(seen.hits, releases.div_ceil(7), "{name}");
    }
    let c = Cycles::PAPER;
    check("tree", &mut Rtc::new(c, 10_000));
    check(
        "flat",
        &mut FlatCache::new(c, 10_000, ResidencyPolicy::Fixed),
    );
}

/// As-published mappings that were reused leave with their first release. Held mappings do not
/// survive if two users share them.
#[test]
fn mappings_as_published_leave_early() {
    let mut as_published = RtcAsPublished::new(Cycles::PAPER, 10_000);
    // 20 mappings, so that no node has more than 32 keys.
    let seen = residency(
        &mut as_published,
        100,
        ReleaseSchedule::in_cycles(100, 20, 5),
    )
    .unwrap();
    assert!(seen.stays.first() < Some(&300), "{seen:?}");
}

/// The fixed queue is first in, first out, also within a cycle. This includes a section
/// that an earlier eviction walked in part, and mappings that have moved into it.
#[test]
fn fixed_queue_is_first_in_first_out() {
    let of = |page| key(page, 1, Direction::ToDevice);
    let mut cache = Rtc::new(Cycles::PAPER, 32);
    for page in 0..32 {
        cache.insert(of(page), Iova::new((page + 1) << 12)).unwrap();
    }
    let forced = |cache: &mut Rtc| {
        let mut evicted = Vec::new();
        cache.evict(|key, _| evicted.push(key.first().get() >> 12));
        evicted
    };
    for page in [7, 3, 9, 5, 1] {
        cache.release(of(page)).unwrap();
    }
    assert_eq!(forced(&mut cache), [7, 3]);
    cache.release(of(2)).unwrap();
    assert_eq!(forced(&mut cache), [9, 5]);
    // Mapping 1 is reused and released in the next cycle, after 4.
    cache.tick(|_, _| panic!("too early"));
    cache.release(of(4)).unwrap();
    cache.acquire(of(1)).unwrap();
    cache.release(of(1)).unwrap();
    assert_eq!(forced(&mut cache), [2, 4]);
    assert_eq!(forced(&mut cache), [1]);
}
