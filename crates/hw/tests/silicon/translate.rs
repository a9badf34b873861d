//! Results of translations: lengths, pages, permissions, pass-through.

use ringfence_hw::{MAX_TRANSLATED_BYTES, UnitConfig};
use ringfence_pgtable::{Context, Levels, SecondStage, TranslationType};
use ringfence_types::FaultReason::{
    AddressBeyondWidth, BadLength, NotPresent, ReadDenied, WriteDenied,
};
use ringfence_types::{Access, PageSize, Permissions};

use crate::rig::{A, B, DISK, GPU, NIC, READ, RW, Rig, Seen, WRITE, arena, format, roomy};

const TOP: u64 = 1 << 48;

#[test]
fn the_whole_length_is_checked() {
    // IOVA, length, outcome
    let cases: [(u64, u64, Seen); 20] = [
        (0x1000, 1, Ok(vec![(0x7000, 1)])),
        (0x1fff, 1, Ok(vec![(0x7fff, 1)])),
        (0x1000, 0x1000, Ok(vec![(0x7000, 0x1000)])),
        // Across a page boundary: to a physically distant page, to an adjacent page, to an unmapped
        // page.
        (0x1ffc, 8, Ok(vec![(0x7ffc, 4), (0x3000, 4)])),
        (0x2ffc, 8, Ok(vec![(0x3ffc, 8)])),
        (0x3ffc, 8, Err((0x4000, NotPresent))),
        (0x1800, 0x2000, Ok(vec![(0x7800, 0x800), (0x3000, 0x1800)])),
        (0x1800, 0x2801, Err((0x4000, NotPresent))),
        (0x0fff, 2, Err((0x0fff, NotPresent))),
        // Across the end of a leaf table, to a mapped and to an unmapped page.
        (0x1f_fffc, 8, Ok(vec![(0x9ffc, 4), (0xb000, 4)])),
        (0x3f_fffc, 8, Err((0x40_0000, NotPresent))),
        // Across the end of the translated range.
        (TOP - 8, 8, Ok(vec![(0xcff8, 8)])),
        (TOP - 4, 8, Err((TOP, AddressBeyondWidth))),
        (TOP, 1, Err((TOP, AddressBeyondWidth))),
        (TOP + 0x1000, 8, Err((TOP + 0x1000, AddressBeyondWidth))),
        // Across the end of the address space, and invalid lengths.
        (u64::MAX, 1, Err((u64::MAX, AddressBeyondWidth))),
        (u64::MAX - 3, 8, Err((u64::MAX - 3, BadLength))),
        (0x1000, u64::MAX, Err((0x1000, BadLength))),
        (0x1000, 0, Err((0x1000, BadLength))),
        (0x1000, MAX_TRANSLATED_BYTES + 1, Err((0x1000, BadLength))),
    ];
    let mem = arena();
    // With and without caches. Each access runs twice: the second time the pages are in the IOTLB.
    for config in [roomy(), UnitConfig::UNCACHED] {
        let mut rig = Rig::new(&mem, &config);
        let table = rig.domain(A, &[NIC]);
        rig.map(&table, 0x1000, 0x7000, 1, RW);
        rig.map(&table, 0x2000, 0x3000, 2, RW);
        rig.map(&table, 0x1f_f000, 0x9000, 1, RW);
        rig.map(&table, 0x20_0000, 0xb000, 1, RW);
        rig.map(&table, 0x3f_f000, 0xe000, 1, RW);
        rig.map(&table, TOP - 0x1000, 0xc000, 1, RW);
        for round in 0..2 {
            for access in [READ, WRITE] {
                for (iova, bytes, outcome) in &cases {
                    assert_eq!(
                        &rig.dma(NIC, *iova, *bytes, access),
                        outcome,
                        "{access} of {bytes} at {iova:#x}, round {round}"
                    );
                }
            }
        }
    }
}

/// IOTLB tags have 57 address bits: higher bits must not be truncated.
#[test]
fn addresses_beyond_the_widest_table_are_no_aliases() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain_of(SecondStage::new(Levels::Five), A, &[NIC]);
    let end = 1_u64 << 57;
    rig.map(&table, 0, 0x7000, 1, RW);
    rig.map(&table, end - 0x1000, 0x8000, 1, RW);
    for iova in [0, end - 1] {
        assert!(rig.dma(NIC, iova, 1, READ).is_ok());
    }
    for iova in [end, end << 1, end << 6, u64::MAX] {
        assert_eq!(
            rig.dma(NIC, iova, 1, READ),
            Err((iova, AddressBeyondWidth)),
            "{iova:#x}"
        );
    }
    assert_eq!(
        rig.dma(NIC, end - 4, 8, READ),
        Err((end, AddressBeyondWidth))
    );
}

#[test]
fn a_denied_page_denies_the_access() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[NIC]);
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    rig.map(&table, 0x2000, 0x8000, 1, Permissions::READ);
    rig.map(&table, 0x3000, 0x9000, 1, RW);
    for _ in 0..2 {
        assert_eq!(
            rig.dma(NIC, 0x1000, 0x3000, READ),
            Ok(vec![(0x7000, 0x3000)])
        );
        assert_eq!(
            rig.dma(NIC, 0x1000, 0x3000, WRITE),
            Err((0x2000, WriteDenied))
        );
    }
}

/// Every permission of the path with every permission of the leaf and every access, at each level
/// of the path.
#[test]
fn permissions_are_those_of_the_whole_path() {
    let rights = [Permissions::READ, Permissions::WRITE, RW];
    let expected = |path: Permissions, leaf: Permissions, access: Access| match access {
        _ if path.allows(access) && leaf.allows(access) => Ok(vec![(0x7010, 4)]),
        Access::Read => Err((0x1010, ReadDenied)),
        Access::Write => Err((0x1010, WriteDenied)),
    };
    let mem = arena();
    for level in 2..=4 {
        for path in rights {
            for leaf in rights {
                for order in [[READ, WRITE], [WRITE, READ]] {
                    let mut rig = Rig::new(&mem, &roomy());
                    let table = rig.domain(A, &[NIC]);
                    rig.map(&table, 0x1000, 0x7000, 1, leaf);
                    rig.poke(&table, level, 0x1000, |raw| raw & !3 | path.bits());
                    // The second round hits entries that the first has cached. The order decides
                    // which access fills.
                    for access in [order, order].concat() {
                        assert_eq!(
                            rig.dma(NIC, 0x1010, 4, access),
                            expected(path, leaf, access),
                            "{access} through {path:?} at level {level}, leaf {leaf:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn larger_pages_are_translated_and_cached_whole() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let format = format(Levels::Four, PageSize::Size1G);
    let table = rig.domain_of(format, A, &[NIC]);
    let (two_mib, one_gib) = (0x20_0000, 0x4000_0000);
    rig.map(&table, two_mib, 4 * two_mib, 512, RW);
    rig.map(&table, one_gib, 8 * one_gib, 512 * 512, Permissions::READ);
    assert_eq!(
        rig.dma(NIC, two_mib + 0x1234, 4, READ),
        Ok(vec![(4 * two_mib + 0x1234, 4)])
    );
    assert_eq!(
        rig.dma(NIC, two_mib, two_mib, WRITE),
        Ok(vec![(4 * two_mib, two_mib)])
    );
    assert_eq!(
        rig.dma(NIC, one_gib, one_gib, READ),
        Ok(vec![(8 * one_gib, one_gib)])
    );
    assert_eq!(
        rig.dma(NIC, 2 * one_gib - 1, 1, WRITE),
        Err((2 * one_gib - 1, WriteDenied))
    );
    assert_eq!(
        rig.dma(NIC, 2 * one_gib - 1, 2, READ),
        Err((2 * one_gib, NotPresent))
    );
    assert_eq!(rig.unit.iotlb_live(), 2);
    assert_eq!(rig.unit.stats().iotlb_hits, 3);
}

#[test]
fn switched_off_everything_passes() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    rig.unit.disable();
    for (iova, bytes) in [(0, 1), (0x1234, 0x10_0000), (u64::MAX, 1), (0, u64::MAX)] {
        assert_eq!(rig.dma(DISK, iova, bytes, WRITE), Ok(vec![(iova, bytes)]));
    }
    for (iova, bytes) in [(0, 0), (u64::MAX, 2), (2, u64::MAX)] {
        assert_eq!(rig.dma(DISK, iova, bytes, READ), Err((iova, BadLength)));
    }
    assert_eq!(rig.unit.stats().passed_through, 4);
    assert_eq!(rig.unit.stats().lookups(), 0);
    rig.unit.enable();
    assert!(rig.dma(DISK, 0, 1, READ).is_err());
}

/// Pass-through uses neither a table nor the IOTLB, but limits the address width.
#[test]
fn a_context_can_pass_through() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    // The domain also has a table and IOTLB entries. Pass-through must ignore them.
    let table = rig.domain(A, &[DISK]);
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    assert_eq!(rig.dma(DISK, 0x1000, 1, READ), Ok(vec![(0x7000, 1)]));
    let translation = TranslationType::PassThrough {
        levels: Levels::Four,
    };
    rig.attach_context(
        NIC,
        &Context {
            domain: A,
            translation,
        },
    );
    for _ in 0..2 {
        assert_eq!(rig.dma(NIC, 0x1000, 1, WRITE), Ok(vec![(0x1000, 1)]));
        assert_eq!(rig.dma(NIC, 0, TOP, READ), Ok(vec![(0, TOP)]));
        assert_eq!(
            rig.dma(NIC, TOP - 1, 2, READ),
            Err((TOP, AddressBeyondWidth))
        );
        assert_eq!(rig.dma(NIC, TOP, 1, READ), Err((TOP, AddressBeyondWidth)));
    }
    assert_eq!(rig.unit.stats().passed_through, 4);
    assert_eq!(rig.unit.stats().lookups(), 1);
}

/// Several address spaces at the same time, and several devices in one.
#[test]
fn domains_are_isolated_and_their_devices_share() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let a = rig.domain(A, &[NIC, GPU]);
    let b = rig.domain(B, &[DISK]);
    rig.map(&a, 0x1000, 0x7000, 1, RW);
    rig.map(&b, 0x1000, 0x8000, 1, RW);
    for _ in 0..2 {
        assert_eq!(rig.dma(NIC, 0x1000, 1, READ), Ok(vec![(0x7000, 1)]));
        assert_eq!(rig.dma(DISK, 0x1000, 1, READ), Ok(vec![(0x8000, 1)]));
        assert_eq!(rig.dma(GPU, 0x1000, 1, READ), Ok(vec![(0x7000, 1)]));
    }
    assert_eq!(rig.unit.iotlb_live(), 2);
    assert_eq!(rig.unit.stats().iotlb_misses, 2);
}
