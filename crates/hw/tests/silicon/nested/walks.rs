//! Memory references and translations of walks through two stages.

use ringfence_hw::NestedUnitConfig;
use ringfence_pgtable::Levels;
use ringfence_types::FaultReason;

use super::{CACHED, GuestMemory, HOST, Nested, UNCACHED, host_of};
use crate::rig::{NIC, READ, RW, WRITE, arena, request};

/// "Up to 24 memory references": m levels over n levels read m * n + m + n words.
#[test]
fn a_walk_reads_24_words_for_four_levels_over_four() {
    let mem = arena();
    for (first_levels, second_levels, references) in [
        (Levels::Four, Levels::Four, 24),
        (Levels::Four, Levels::Three, 19),
        (Levels::Four, Levels::Five, 29),
        (Levels::Five, Levels::Four, 29),
        (Levels::Five, Levels::Five, 35),
    ] {
        let mut nested = Nested::new(&mem, &UNCACHED, second_levels);
        let first = nested.first(first_levels);
        nested.attach(NIC, 1, &first, first_levels);
        nested.map_first(&first, 0x7_0000, 0x3000, RW);
        nested.map_second(0x3000, RW);
        let expected = Ok(vec![(host_of(0x3000) + 8, 16)]);
        for walks in 1..=2 {
            assert_eq!(nested.dma(NIC, 0x7_0008, 16, WRITE), expected);
            assert_eq!(nested.unit.stats().walk_references, walks * references);
        }
    }
}

/// The cache of the second stage leaves the entries of the first to read; the IOTLB leaves nothing.
#[test]
fn caches_of_both_stages_shorten_the_walk() {
    let mem = arena();
    for (config, references) in [(NestedUnitConfig { iotlb: 0, ..CACHED }, 4), (CACHED, 0)] {
        let mut nested = Nested::new(&mem, &config, Levels::Four);
        let first = nested.first(Levels::Four);
        nested.attach(NIC, 1, &first, Levels::Four);
        nested.map_first(&first, 0x7_0000, 0x3000, RW);
        nested.map_second(0x3000, RW);
        assert!(nested.dma(NIC, 0x7_0000, 1, WRITE).is_ok());
        let before = nested.unit.stats().walk_references;
        assert!(nested.dma(NIC, 0x7_0000, 1, WRITE).is_ok());
        let after = nested.unit.stats().walk_references;
        assert_eq!(after - before, references, "{config:?}");
    }
}

/// A cached translation covers the smaller page of both stages.
#[test]
fn large_pages_of_one_stage_are_split_by_the_other() {
    let mem = arena();
    let mut nested = Nested::new(&mem, &CACHED, Levels::Four);
    let first = nested.first(Levels::Four);
    nested.attach(NIC, 1, &first, Levels::Four);
    let memory = GuestMemory(&mem);
    // A large page of the guest over small pages of the host.
    let large = request(0x20_0000, 0x40_0000, 512, RW);
    first.map(&memory, &nested.guest_frames, large).unwrap();
    for guest in [0x40_0000, 0x40_1000] {
        nested.map_second(guest, RW);
    }
    // Small pages of the guest over a large page of the host.
    let host = HOST + (16 << 20);
    let large = request(0x60_0000, host, 512, RW);
    nested.second.map(&mem, &nested.host_frames, large).unwrap();
    nested.map_first(&first, 0x1000, 0x60_5000, RW);
    nested.map_first(&first, 0x2000, 0x60_3000, RW);
    for _ in 0..2 {
        for (iova, at) in [
            (0x20_0000, host_of(0x40_0000)),
            (0x20_1000, host_of(0x40_1000)),
            (0x1000, host + 0x5000),
            (0x2000, host + 0x3000),
        ] {
            assert_eq!(nested.dma(NIC, iova + 8, 8, WRITE), Ok(vec![(at + 8, 8)]));
        }
        assert_eq!(
            nested.dma(NIC, 0x20_2000, 1, READ),
            Err((0x20_2000, FaultReason::NotPresent))
        );
    }
    assert_eq!(nested.unit.iotlb_live(), 4);
}
