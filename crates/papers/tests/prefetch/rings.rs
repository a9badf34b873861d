//! Claims of the rIOMMU paper about the three prefetchers on rings (section 5.4), with real walks
//! of a table in memory.

use ringfence_memory::{Arena, Frames};
use ringfence_papers::prefetch::{
    Distance, LookupOutcome, Markov, PrefetchConfig, PrefetchStats, Prefetcher, PrefetchingIotlb,
    Recency, RingPair, Variant,
};
use ringfence_pgtable::{Coherency, Cursor, Levels, MapRequest, SecondStage, Table, walk};
use ringfence_types::{DomainId, Permissions, Pfn, PfnRange, PhysAddr, PhysRange};

const LAPS: u64 = 6;
const RINGS: [u32; 3] = [8, 32, 128];

/// Order of the pages of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Descending from the top of the 32-bit space, as an empty IOVA tree allocates.
    Tidy,
    /// All distances between neighbours differ.
    Scattered,
}

fn page(order: Order, at: u32) -> Pfn {
    let at = u64::from(at);
    Pfn::new(match order {
        Order::Tidy => 0xf_ffff - at,
        Order::Scattered => 0x1000 + at * (at + 1) / 2,
    })
}

/// A receive ring: the device uses each page once; the driver unmaps it and maps it again in the
/// next lap.
fn ring<P: Prefetcher>(variant: Variant, history: u32, ring: u32, order: Order) -> PrefetchStats {
    let arena = Arena::new(64 << 20).unwrap();
    let region = PhysRange::new(PhysAddr::new(0x1000), (32 << 20) - 0x1000).unwrap();
    let frames = Frames::new(&arena, region);
    let format = SecondStage::new(Levels::Four);
    let table = Table::new(
        format,
        DomainId::new(1),
        Coherency::Coherent,
        &arena,
        &frames,
    )
    .unwrap();
    let map = |page: Pfn| {
        let request = MapRequest {
            iova: page.iova(),
            pa: PhysAddr::new(32 << 20),
            pages: 1,
            permissions: Permissions::READ_WRITE,
        };
        table.map(&arena, &frames, request).unwrap();
    };
    let mapped = |page: Pfn| {
        let root = Cursor::root(&format, table.root());
        walk(&format, &arena, root, page.iova(), |_| {}).is_ok()
    };
    let mut iotlb = PrefetchingIotlb::<P>::new(PrefetchConfig::new(variant, history), 4, 4);
    (0..ring).for_each(|at| map(page(order, at)));
    for _ in 0..LAPS {
        for page in (0..ring).map(|at| page(order, at)) {
            assert_ne!(iotlb.access(page, mapped), LookupOutcome::Faulted);
            let range = PfnRange::new(page, 1).unwrap();
            let _ = table.unmap(&arena, range).unwrap();
            iotlb.unmap(page);
            map(page);
        }
    }
    let stats = *iotlb.stats();
    assert_eq!((stats.hits, stats.misses), (0, LAPS * u64::from(ring)));
    stats
}

/// Number of accesses from the second lap on, except the first.
fn all_but_the_first_lap(ring: u32) -> u64 {
    (LAPS - 1) * u64::from(ring) - 1
}

#[test]
fn recency_and_markov_need_a_history_of_the_ring() {
    for size in RINGS {
        for order in [Order::Tidy, Order::Scattered] {
            for history in [0, 1, size / 4, size / 2, size - 1, size, size + 1, 4 * size] {
                let expected = match history >= size {
                    true => all_but_the_first_lap(size),
                    false => 0,
                };
                let markov = ring::<Markov>(Variant::Modified, history, size, order);
                let recency = ring::<Recency>(Variant::Modified, history, size, order);
                for (name, stats) in [("Markov", markov), ("Recency", recency)] {
                    let case = format!("{name}, ring {size} {order:?}, history {history}");
                    assert_eq!(stats.predicted, expected, "{case}");
                    assert!(stats.verification_walks >= stats.predicted, "{case}");
                }
            }
        }
    }
}

#[test]
fn baselines_predict_nothing_after_invalidations() {
    for size in RINGS {
        for order in [Order::Tidy, Order::Scattered] {
            for history in [size / 2, size, 16 * size] {
                let all = [
                    ring::<Markov>(Variant::Baseline, history, size, order),
                    ring::<Recency>(Variant::Baseline, history, size, order),
                    ring::<Distance>(Variant::Baseline, history, size, order),
                ];
                for stats in all {
                    assert_eq!((stats.predicted, stats.verification_walks), (0, 0));
                }
            }
        }
    }
}

/// The rIOMMU paper found Distance ineffective in its traces. On a single ring this depends on the
/// distances between the pages.
#[test]
fn distance_needs_a_row_for_each_distance_of_the_ring() {
    for size in RINGS {
        let rate = |history, order| {
            let stats = ring::<Distance>(Variant::Modified, history, size, order);
            stats.predicted
        };
        // Two distances: one step down, and back to the top. Until the prefetcher has learned them,
        // each lap starts with a miss.
        assert!(rate(2, Order::Tidy) >= all_but_the_first_lap(size));
        assert_eq!(rate(size - 1, Order::Scattered), 0);
        assert!(rate(size, Order::Scattered) >= all_but_the_first_lap(size) - 1);
    }
}

/// Between two walks there is either no event or the invalidation at the end of a burst of unmaps.
#[test]
fn two_entries_predict_every_access_of_a_ring() {
    for size in RINGS.map(u64::from) {
        for burst in [None, Some(1), Some(4), Some(size)] {
            let mut pair = RingPair::new();
            let accesses = LAPS * size;
            for entry in 0..accesses {
                // The device owns this entry and the rest of the ring after it.
                let owned = entry..entry + size;
                let served = pair.access(entry, |other| owned.contains(&other));
                let first = burst.map_or(entry == 0, |burst| entry % burst == 0);
                let expected = match first {
                    true => LookupOutcome::Walked,
                    false => LookupOutcome::Predicted,
                };
                assert_eq!(
                    served, expected,
                    "ring {size}, burst {burst:?}, entry {entry}"
                );
                if burst.is_some_and(|burst| (entry + 1) % burst == 0) {
                    pair.invalidate();
                }
            }
            let stats = pair.stats();
            let walks = burst.map_or(1, |burst| accesses / burst);
            assert_eq!(stats.predicted, accesses - walks);
            assert_eq!((stats.mispredicted, stats.faults), (0, 0));
            assert_eq!(stats.discarded, burst.map_or(0, |_| walks));
        }
    }
}

#[test]
fn pair_fixes_the_defects_of_the_figures() {
    let mut pair = RingPair::new();
    let mut access = |entry, owned: std::ops::Range<u64>| {
        let served = pair.access(entry, |other| owned.contains(&other));
        (served, *pair.stats())
    };
    // The only valid entry: no successor to prefetch.
    assert_eq!(access(0, 0..1).0, LookupOutcome::Walked);
    // Mapped since, but not prefetched.
    assert_eq!(access(1, 1..3).0, LookupOutcome::Walked);
    assert_eq!(access(1, 1..3).0, LookupOutcome::Cached);
    // Out of order: the prefetched 2 was wrong and is dropped.
    let (served, stats) = access(5, 2..6);
    assert_eq!((served, stats.mispredicted), (LookupOutcome::Walked, 1));
    assert_eq!(access(2, 2..6).0, LookupOutcome::Walked);
    assert_eq!(access(3, 2..6).0, LookupOutcome::Predicted);
    // Not mapped: cached entries stay.
    assert_eq!(access(9, 2..6).0, LookupOutcome::Faulted);
    assert_eq!(access(3, 2..6).0, LookupOutcome::Cached);
    assert_eq!(access(4, 2..6).0, LookupOutcome::Predicted);
    // The highest number has no successor.
    assert_eq!(access(u64::MAX, 0..u64::MAX).0, LookupOutcome::Faulted);
}
