//! Entries of 64 KiB: miss counts that follow from the accesses, and no reach beyond a mapping.

use proptest::prelude::*;
use ringfence_hw::{AdjacentPrefetch, PrefetchSide, UnitConfig};
use ringfence_pgtable::{Levels, SecondStage, Table};
use ringfence_types::{CachedLevels, Invalidation, PageSize};

use crate::rig::{A, DISK, NIC, READ, RW, Rig, arena, cases, pages_at, request, roomy};

const PAGE: u64 = 4096;
const HINT: u64 = 1 << 52;

const fn hinted() -> SecondStage {
    SecondStage::new(Levels::Four).with_contiguous_hint()
}

/// Accesses each of `pages` pages at `iova` once; returns misses, prefetched pages and words read.
fn counts(rig: &mut Rig<'_>, iova: u64, pages: u64) -> [u64; 3] {
    rig.unit.reset_stats();
    for page in 0..pages {
        rig.dma(NIC, iova + page * PAGE, 8, READ).unwrap();
    }
    let stats = rig.unit.stats();
    assert_eq!(stats.lookups(), pages);
    [stats.iotlb_misses, stats.prefetched, stats.walk_references]
}

/// A 64 KiB mapping at an aligned address with aligned frames is one entry. Each condition that
/// does not hold costs 16 entries; a mapping with unaligned ends keeps the groups inside.
#[test]
fn misses_of_a_mapping_by_alignment_and_length() {
    let mem = arena();
    for (name, iova, pa, pages, misses) in [
        ("aligned", 0x10_0000, 0x20_0000, 16, 1),
        ("IOVA not aligned", 0x10_1000, 0x20_0000, 16, 16),
        ("frames not aligned", 0x10_0000, 0x20_1000, 16, 16),
        ("both one page off", 0x10_1000, 0x20_1000, 16, 16),
        ("one page short", 0x10_0000, 0x20_0000, 15, 15),
        ("one page more", 0x10_0000, 0x20_0000, 17, 2),
        ("128 KiB", 0x10_0000, 0x20_0000, 32, 2),
        ("two groups with ends", 0x10_f000, 0x20_f000, 34, 4),
    ] {
        let mut rig = Rig::new(&mem, &roomy());
        rig.unit.set_contiguous_hint(true);
        let table = rig.domain_of(hinted(), A, &[NIC]);
        rig.map(&table, iova, pa, pages, RW);
        assert_eq!(counts(&mut rig, iova, pages)[0], misses, "{name}");
        // The page on either side is out of reach.
        assert!(rig.dma(NIC, iova - PAGE, 8, READ).is_err(), "{name}");
        assert!(
            rig.dma(NIC, iova + pages * PAGE, 8, READ).is_err(),
            "{name}"
        );
        rig.unmap(&table, iova, pages);
        let range = pages_at(iova, pages);
        let levels = CachedLevels::Leaves;
        rig.unit.invalidate(&Invalidation::Pages {
            domain: A,
            range,
            levels,
        });
        for page in 0..pages {
            assert!(
                rig.dma(NIC, iova + page * PAGE, 8, READ).is_err(),
                "{name} {page}"
            );
        }
    }
}

/// A unit without the extension ignores the bit, like VT-d.
#[test]
fn a_unit_without_the_hint_reads_every_page() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain_of(hinted(), A, &[NIC]);
    rig.map(&table, 0x10_0000, 0x20_0000, 16, RW);
    assert_eq!(counts(&mut rig, 0x10_0000, 16), [16, 0, 16 + 3]);
    rig.unit.set_contiguous_hint(true);
    assert_eq!(counts(&mut rig, 0x10_0000, 16)[0], 1);
}

/// A hint on an entry whose page is elsewhere in its 64 KiB moves the whole entry: the unit
/// translates as the entry's group, and reaches the 64 KiB that contain its page and no others.
/// VMSAv8-64 permits this ("Misprogramming the Contiguous bit").
#[test]
fn a_hint_on_a_misplaced_entry_reaches_its_group_only() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    rig.unit.set_contiguous_hint(true);
    let table = rig.domain_of(hinted(), A, &[NIC]);
    rig.map(&table, 0x10_3000, 0x20_5000, 1, RW);
    rig.poke(&table, 1, 0x10_3000, |raw| raw | HINT);
    assert_eq!(rig.dma(NIC, 0x10_3008, 8, READ), Ok(vec![(0x20_3008, 8)]));
    assert_eq!(rig.dma(NIC, 0x10_f008, 8, READ), Ok(vec![(0x20_f008, 8)]));
    assert!(rig.dma(NIC, 0x11_0000, 8, READ).is_err());
}

/// An invalidation of any page of a group drops its entry, and a prefetch moves by whole entries.
#[test]
fn a_prefetch_after_a_group_reads_the_next_group() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    rig.unit.set_contiguous_hint(true);
    rig.unit.set_adjacent_prefetch(Some(AdjacentPrefetch {
        side: PrefetchSide::Higher,
        pages: 1,
    }));
    let table = rig.domain_of(hinted(), A, &[NIC]);
    rig.map(&table, 0x10_0000, 0x20_0000, 64, RW);
    let [misses, prefetched, _] = counts(&mut rig, 0x10_0000, 64);
    assert_eq!((misses, prefetched), (2, 2));
    // The last group was prefetched. Unmapped and invalidated, it is out of reach.
    rig.unmap(&table, 0x13_0000, 16);
    assert!(
        rig.dma(NIC, 0x13_8000, 8, READ).is_ok(),
        "stale until invalidated"
    );
    let (range, levels) = (pages_at(0x13_5000, 1), CachedLevels::Leaves);
    rig.unit.invalidate(&Invalidation::Pages {
        domain: A,
        range,
        levels,
    });
    assert!(rig.dma(NIC, 0x13_8000, 8, READ).is_err());
}

/// Part of a group cannot be unmapped, and a refused unmap changes nothing.
#[test]
fn unmap_refuses_a_part_of_a_group() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain_of(hinted(), A, &[NIC]);
    rig.map(&table, 0x10_0000, 0x20_0000, 32, RW);
    for (iova, pages) in [
        (0x10_0000, 1),
        (0x10_1000, 31),
        (0x10_0000, 31),
        (0x10_8000, 1),
    ] {
        assert!(
            table.unmap(&mem, pages_at(iova, pages)).is_err(),
            "{iova:#x} {pages}"
        );
    }
    rig.unmap(&table, 0x11_0000, 16);
    rig.unmap(&table, 0x10_0000, 16);
}

/// An operation of the property test: numbers of pages, and pages within 1 MiB.
#[derive(Debug, Clone)]
enum Op {
    Map { iova: u64, pa: u64, pages: u64 },
    Unmap(usize),
    Access(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let page = || prop_oneof![3 => (0_u64..16).prop_map(|group| group * 16), 1 => 0_u64..256];
    prop_oneof![
        3 => (page(), page(), prop_oneof![1_u64..50, Just(16_u64), Just(32_u64)])
            .prop_map(|(iova, pa, pages)| Op::Map { iova, pa, pages }),
        2 => any::<usize>().prop_map(Op::Unmap),
        6 => (0_u64..320).prop_map(Op::Access),
    ]
}

proptest! {
    #![proptest_config(cases(200, 0x64_0043))]

    /// With strict invalidation, a unit with large entries and prefetch reaches exactly the bytes
    /// that an uncached unit reaches through a table of 4 KiB entries: no entry covers a byte
    /// outside its mapping, and none survives its invalidation.
    #[test]
    fn large_entries_reach_the_bytes_of_small_ones(
        ops in prop::collection::vec(op(), 1..60),
        prefetched in 0_u8..5,
    ) {
        let (mem, plain_mem) = (arena(), arena());
        let mut rig = Rig::new(&mem, &roomy());
        rig.unit.set_contiguous_hint(true);
        rig.unit.set_adjacent_prefetch((prefetched > 0).then_some(AdjacentPrefetch {
            side: PrefetchSide::Higher,
            pages: prefetched,
        }));
        let format = hinted().with_pages_up_to(PageSize::Size2M);
        let table = rig.domain_of(format, A, &[NIC]);
        let mut plain = Rig::new(&plain_mem, &UnitConfig::UNCACHED);
        let small: Table<SecondStage> = plain.domain(A, &[NIC]);
        let mut live: Vec<(u64, u64)> = Vec::new();
        for op in ops {
            match op {
                Op::Map { iova, pa, pages } => {
                    let wanted = request((0x400 + iova) * PAGE, (0x800 + pa) * PAGE, pages, RW);
                    let mapped = table.map(&mem, &rig.frames, wanted);
                    prop_assert_eq!(mapped, small.map(&plain_mem, &plain.frames, wanted));
                    if mapped.is_ok() {
                        live.push((wanted.iova.get(), pages));
                    }
                }
                Op::Unmap(which) if !live.is_empty() => {
                    let (iova, pages) = live.swap_remove(which % live.len());
                    rig.unmap(&table, iova, pages);
                    plain.unmap(&small, iova, pages);
                    let (range, levels) = (pages_at(iova, pages), CachedLevels::Leaves);
                    rig.unit.invalidate(&Invalidation::Pages { domain: A, range, levels });
                }
                Op::Unmap(_) => {}
                Op::Access(page) => {
                    let at = (0x3ff + page) * PAGE;
                    let seen = rig.dma(NIC, at, 2 * PAGE, READ);
                    prop_assert_eq!(seen, plain.dma(NIC, at, 2 * PAGE, READ), "{:#x}", at);
                    prop_assert!(rig.dma(DISK, at, 8, READ).is_err());
                }
            }
        }
        for page in 0..320 {
            let at = (0x3ff + page) * PAGE;
            prop_assert_eq!(rig.dma(NIC, at, 8, READ), plain.dma(NIC, at, 8, READ), "{:#x}", at);
        }
    }
}
