//! Memory references of a walk, with and without walk caches (F&S).

use ringfence_hw::{Geometry, IommuStats, UnitConfig, WALK_CACHES};
use ringfence_pgtable::{Levels, SecondStage};
use ringfence_types::PageSize;

use crate::rig::{A, NIC, READ, RW, Rig, arena, format, geometry, roomy};

#[test]
fn references_without_caches_are_the_depth() {
    let cases = [
        (format(Levels::Three, PageSize::Size4K), 1, 3),
        (format(Levels::Four, PageSize::Size4K), 1, 4),
        (format(Levels::Five, PageSize::Size4K), 1, 5),
        (format(Levels::Four, PageSize::Size2M), 512, 3),
        (format(Levels::Four, PageSize::Size1G), 512 * 512, 2),
        (format(Levels::Five, PageSize::Size1G), 512 * 512, 3),
    ];
    let mem = arena();
    for (format, pages, references) in cases {
        let mut rig = Rig::new(&mem, &UnitConfig::UNCACHED);
        let table = rig.domain_of(format, A, &[NIC]);
        let base = PageSize::Size1G.bytes();
        rig.map(&table, base, base, pages, RW);
        assert!(rig.dma(NIC, base, 1, READ).is_ok());
        assert_eq!(rig.unit.stats().walk_references, references, "{format:?}");
        assert_eq!(rig.unit.stats().walk_cache_hits, [0; WALK_CACHES]);
    }
}

/// Returns the counters of one access.
fn step(rig: &mut Rig<'_>, iova: u64) -> (u64, [u64; WALK_CACHES], [u64; WALK_CACHES]) {
    rig.unit.reset_stats();
    assert!(rig.dma(NIC, iova, 1, READ).is_ok(), "{iova:#x}");
    let IommuStats {
        walk_references,
        walk_cache_hits,
        walk_cache_misses,
        ..
    } = *rig.unit.stats();
    (walk_references, walk_cache_hits, walk_cache_misses)
}

#[test]
fn each_level_shortens_the_walk() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain_of(SecondStage::new(Levels::Five), A, &[NIC]);
    // Pages 0, 4 KiB, 2 MiB, 1 GiB, 512 GiB and 256 TiB.
    let pages: Vec<u64> = [0, 12, 21, 30, 39, 48]
        .into_iter()
        .map(|shift| if shift == 0 { 0 } else { 1 << shift })
        .collect();
    for page in &pages {
        rig.map(&table, *page, 0x7000, 1, RW);
    }
    // Cold caches: five references, and a miss in all three walk caches.
    assert_eq!(step(&mut rig, 0), (5, [0, 0, 0], [1, 1, 1]));
    // A page of the same level 1 table, then pages that share only the level 2 and the level 3
    // table.
    assert_eq!(step(&mut rig, 1 << 12), (1, [1, 0, 0], [0, 0, 0]));
    assert_eq!(step(&mut rig, 1 << 21), (2, [0, 1, 0], [1, 0, 0]));
    assert_eq!(step(&mut rig, 1 << 30), (3, [0, 0, 1], [1, 1, 0]));
    // Pointers to level 4 tables are not cached.
    assert_eq!(step(&mut rig, 1 << 39), (5, [0, 0, 0], [1, 1, 1]));
    assert_eq!(step(&mut rig, 1 << 48), (5, [0, 0, 0], [1, 1, 1]));
    assert_eq!(rig.unit.walk_caches_live(), [5, 4, 3]);
    // Now in the IOTLB.
    assert_eq!(step(&mut rig, 1 << 30), (0, [0; 3], [0; 3]));
}

#[test]
fn levels_above_the_root_are_not_looked_into() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain_of(SecondStage::new(Levels::Three), A, &[NIC]);
    rig.map(&table, 0, 0x7000, 1, RW);
    assert_eq!(step(&mut rig, 0), (3, [0; 3], [1, 1, 0]));
    assert_eq!(rig.unit.walk_caches_live(), [1, 1, 0]);
}

/// In F&S, addresses stay close together and the walk caches hit. Addresses spread over more tables
/// than the caches hold miss.
#[test]
fn capacity_determines_hits() {
    let mem = arena();
    for (entries, misses) in [(4, 4), (2, 8)] {
        let mut config = roomy();
        config.iotlb = Geometry::ABSENT;
        config.walk_caches = [geometry(1, entries); WALK_CACHES];
        let mut rig = Rig::new(&mem, &config);
        let table = rig.domain(A, &[NIC]);
        for i in 0..4 {
            rig.map(&table, i << 21, 0x7000, 1, RW);
        }
        for round in 0..2 {
            for i in 0..4_u64 {
                assert!(rig.dma(NIC, i << 21, 1, READ).is_ok(), "{round}");
            }
        }
        assert_eq!(rig.unit.stats().walk_cache_misses[0], misses);
        assert_eq!(rig.unit.stats().walk_cache_misses[1], 1);
    }
}
