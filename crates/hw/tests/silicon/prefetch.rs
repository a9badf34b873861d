//! Strategies against IOTLB misses (W11): miss counts that follow from the accesses.

use ringfence_hw::{AdjacentPrefetch, PrefetchSide, UnitConfig};
use ringfence_pgtable::Levels;
use ringfence_types::{Invalidation, PageSize, Permissions, Pfn, PfnRange};

use crate::rig::{A, DISK, NIC, READ, RW, Rig, WRITE, arena, format, geometry, pages_at, roomy};

/// Pages of a buffer that the device streams through.
const PAGES: u64 = 512;

/// Reads `PAGES` pages in order, and returns misses, prefetched pages, and words read by both.
fn stream(largest: PageSize, prefetch: Option<AdjacentPrefetch>, down: bool) -> [u64; 3] {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain_of(format(Levels::Four, largest), A, &[NIC]);
    rig.map(&table, 0x4000_0000, 0x20_0000, PAGES, RW);
    rig.unit.set_adjacent_prefetch(prefetch);
    for page in 0..PAGES {
        let page = if down { PAGES - 1 - page } else { page };
        let at = 0x4000_0000 + page * 4096;
        assert_eq!(
            rig.dma(NIC, at, 8, READ),
            Ok(vec![(0x20_0000 + page * 4096, 8)])
        );
    }
    let stats = rig.unit.stats();
    assert_eq!(stats.lookups(), PAGES);
    [
        stats.iotlb_misses,
        stats.prefetched,
        stats.walk_references + stats.prefetch_references,
    ]
}

/// A prefetch of n pages in the direction of the accesses leaves one miss in n + 1. A large page
/// leaves one miss in all. The walks read as many words in every strategy but the large page.
#[test]
fn misses_of_a_stream_by_strategy() {
    let adjacent = |side, pages| Some(AdjacentPrefetch { side, pages });
    let (up, down) = (PrefetchSide::Higher, PrefetchSide::Lower);
    let small = PageSize::Size4K;
    for (name, largest, prefetch, downward, misses) in [
        ("none", small, None, false, 512),
        ("next page", small, adjacent(up, 1), false, 256),
        ("next three pages", small, adjacent(up, 3), false, 128),
        (
            "previous page, upward",
            small,
            adjacent(down, 1),
            false,
            512,
        ),
        (
            "previous page, downward",
            small,
            adjacent(down, 1),
            true,
            256,
        ),
        ("2 MiB page", PageSize::Size2M, None, false, 1),
    ] {
        let [found, prefetched, words] = stream(largest, prefetch, downward);
        assert_eq!(found, misses, "{name}");
        if largest == small && misses < 512 {
            assert_eq!(prefetched, 512 - misses, "{name}");
        }
        // Three upper levels once, then a leaf for each page. The page below the buffer is not
        // mapped: its walk reads one absent entry.
        let below = u64::from(name == "previous page, upward");
        let expected = if largest == small { 512 + 3 + below } else { 3 };
        assert_eq!(words, expected, "{name}");
    }
}

/// A hint after the map leaves no miss for the device, as long as the IOTLB has room.
#[test]
fn a_hint_after_the_map_prevents_the_first_miss() {
    let mem = arena();
    for (sets, misses) in [(16, 0), (1, 4)] {
        let config = UnitConfig {
            iotlb: geometry(sets, 4),
            ..roomy()
        };
        let mut rig = Rig::new(&mem, &config);
        let table = rig.domain(A, &[NIC]);
        rig.map(&table, 0x1000, 0x7000, 8, Permissions::WRITE);
        rig.unit.prefetch(&mem, NIC, &pages_at(0x1000, 8));
        assert_eq!(rig.unit.stats().prefetched, 8);
        assert_eq!(rig.unit.stats().lookups(), 0);
        // Backwards: the last pages of the hint are cached.
        for page in (0..8).rev() {
            assert!(rig.dma(NIC, 0x1000 + page * 4096, 8, WRITE).is_ok());
        }
        assert_eq!(rig.unit.stats().iotlb_misses, misses, "{sets} sets");
    }
}

/// Prefetched entries obey invalidations, permissions and domains, and cache nothing absent.
#[test]
fn a_prefetch_changes_no_outcome() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[NIC]);
    rig.unit.set_adjacent_prefetch(Some(AdjacentPrefetch {
        side: PrefetchSide::Higher,
        pages: 2,
    }));
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    rig.map(&table, 0x2000, 0x9000, 1, Permissions::READ);
    // The first access prefetches the second page, and not the third, which is not mapped.
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
    assert_eq!((rig.unit.stats().prefetched, rig.unit.iotlb_live()), (1, 2));
    assert_eq!(rig.unit.stats().faults, 0);
    assert!(rig.dma(NIC, 0x2000, 1, WRITE).is_err());
    rig.map(&table, 0x3000, 0xb000, 1, RW);
    assert!(rig.dma(NIC, 0x3000, 1, READ).is_ok());
    // An unmapped page with a prefetched entry is stale until its invalidation.
    rig.unmap(&table, 0x2000, 1);
    assert!(rig.dma(NIC, 0x2000, 1, READ).is_ok());
    let range = PfnRange::new(Pfn::new(2), 1).unwrap();
    rig.unit.invalidate(&Invalidation::Pages {
        domain: A,
        range,
        levels: ringfence_types::CachedLevels::Leaves,
    });
    assert!(rig.dma(NIC, 0x2000, 1, READ).is_err());
    // A hint for a device without a context, and at the top of the address space.
    rig.unit.prefetch(&mem, DISK, &pages_at(0x1000, 1));
    rig.unit
        .prefetch(&mem, NIC, &pages_at((1 << 48) - 0x1000, 600));
    rig.map(&table, (1 << 48) - 0x1000, 0xd000, 1, RW);
    assert!(rig.dma(NIC, (1 << 48) - 8, 8, READ).is_ok());
}
