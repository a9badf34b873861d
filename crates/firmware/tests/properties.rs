//! Properties: tables of a builder keep their facts, merged regions equal a set of pages, and no
//! input makes a parser panic or run for long.

mod common;

use std::collections::BTreeSet;

use common::{Bridges, dmar, drhd, fix_checksum, fixture, ivhd, ivrs, mapping, nodes, rid, rmrr};
use common::{pci_range, root_complex, scope, smmu_v3, viot};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use ringfence_firmware::{
    DeviceTree, Dmar, Iort, Ivrs, NoBridges, ReservedRegion, Rimt, TooManyRanges, Treatment, Viot,
    X86_INTERRUPTS, merge_reserved,
};
use ringfence_types::{Iova, IovaRange, Pfn, PfnRange, RequesterId};

/// A runner with a fixed seed.
fn runner(cases: u32) -> TestRunner {
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

fn region(first: u64, last: u64) -> ReservedRegion {
    let range = IovaRange::inclusive(Iova::new(first), Iova::new(last)).expect("a range");
    ReservedRegion {
        range,
        treatment: Treatment::Untranslated,
    }
}

fn pages(lo: u64, hi: u64) -> PfnRange {
    PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).expect("a range")
}

#[test]
fn merged_regions_are_the_set_of_their_pages() {
    let regions = prop::collection::vec((0..64_u64, 0..3_u64, 0..4096_u64), 0..24);
    runner(2000)
        .run(&regions, |regions| {
            let mut buffer = [pages(7, 7); 32];
            let list = regions.iter().map(|(page, more, offset)| {
                region(page << 12 | offset, ((page + more) << 12) + offset)
            });
            let merged = merge_reserved(list, &mut buffer).expect("enough room");
            for pair in merged.windows(2) {
                prop_assert!(pair[0].hi().get() + 1 < pair[1].lo().get(), "{pair:?}");
            }
            let found: BTreeSet<u64> = merged
                .iter()
                .flat_map(|range| range.lo().get()..=range.hi().get())
                .collect();
            let expected = regions
                .iter()
                .flat_map(|(page, more, _)| *page..=page + more);
            prop_assert_eq!(found, expected.collect::<BTreeSet<u64>>());
            Ok(())
        })
        .expect("the property holds");
}

#[test]
fn merged_regions_stay_in_the_buffer() {
    let mut buffer = [pages(0, 0); 2];
    let apart = [
        region(0x1000, 0x1fff),
        region(0x3000, 0x3fff),
        region(0x5000, 0x5fff),
    ];
    assert_eq!(merge_reserved(apart, &mut buffer), Err(TooManyRanges));
    let joined = [apart[0], apart[1], region(0x2000, 0x2000), apart[2]];
    let expected = [pages(1, 3), pages(5, 5)];
    assert_eq!(
        merge_reserved(joined, &mut buffer).expect("enough room"),
        expected
    );
    assert_eq!(merge_reserved([apart[0]], &mut []), Err(TooManyRanges));
    assert_eq!(merge_reserved([], &mut []).expect("nothing"), []);
    // The last page of the address space, and the region of interrupts.
    let ends = [
        region(u64::MAX, u64::MAX),
        X86_INTERRUPTS,
        region(0, u64::MAX),
    ];
    let merged = merge_reserved(ends[..2].to_vec(), &mut buffer).expect("enough room");
    assert_eq!(
        merged,
        [
            pages(0xfee00, 0xfeeff),
            pages(Pfn::MAX.get(), Pfn::MAX.get())
        ]
    );
    let merged = merge_reserved(ends, &mut buffer).expect("enough room");
    assert_eq!(merged, [pages(0, Pfn::MAX.get())]);
    let message = "the reserved regions need more ranges than the buffer has";
    assert_eq!(TooManyRanges.to_string(), message);
}

#[test]
fn a_built_dmar_keeps_its_facts() {
    let unit = (0..3_u16, 0..32_u8, any::<bool>());
    let tables = prop::collection::vec(unit, 1..10);
    runner(300)
        .run(&(tables, 0..3_u16, 0..32_u8), |(units, segment, device)| {
            let structures = units.iter().zip(1_u64..).flat_map(|(unit, number)| {
                let (segment, device, all) = *unit;
                let scopes = [scope(1, 0, 0, &[(device, 0)])];
                let first = number << 16;
                [
                    drhd(
                        u8::from(all),
                        segment,
                        number << 12,
                        if all { &[] } else { &scopes },
                    ),
                    rmrr(segment, first, first + 0xfff, &scopes),
                ]
            });
            let table = dmar(&structures.collect::<Vec<_>>());
            let table = Dmar::new(&table).expect("a valid table");
            let named = |unit: &(u16, u8, bool)| unit.0 == segment && !unit.2 && unit.1 == device;
            let all = |unit: &(u16, u8, bool)| unit.0 == segment && unit.2;
            let expected = units.iter().position(named).or(units.iter().position(all));
            let found = table.unit_of(segment, rid(0, device, 0), &NoBridges);
            let number = found.map(|unit| (unit.registers.get() >> 12) as usize - 1);
            prop_assert_eq!(number, expected);
            let reserved = table.reserved_regions(segment, rid(0, device, 0), NoBridges);
            let ours = units
                .iter()
                .filter(|unit| unit.0 == segment && unit.1 == device);
            prop_assert_eq!(reserved.count(), ours.count());
            Ok(())
        })
        .expect("the property holds");
}

#[test]
fn built_ranges_keep_their_ids() {
    let case = (any::<u16>(), any::<u16>(), any::<u16>(), 0..0x1000_u32);
    runner(300)
        .run(&case, |(a, b, device, base)| {
            let (first, last) = (a.min(b), a.max(b));
            let inside = first <= device && device <= last;
            let (low, more) = (u32::from(first), u32::from(last - first));
            let expected = inside.then(|| base + u32::from(device) - low);
            let device = RequesterId::new(device);

            let mappings = [mapping(low, more, base, 48, 0)];
            let table = nodes(
                b"IORT",
                5,
                &[smmu_v3(0x1000, 0, &[]), root_complex(0, &mappings)],
            );
            let found = Iort::new(&table).expect("a valid table").unit_of(0, device);
            prop_assert_eq!(found.expect("sound").map(|found| found.id), expected);

            let range = pci_range(base, [0, 0], [first, last], 72);
            let unit = vec![4, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0];
            let table = viot(&[range, unit]);
            let found = Viot::new(&table).expect("a valid table").unit_of(0, device);
            prop_assert_eq!(found.expect("sound").map(|found| found.id), expected);

            let [start, end] = [first, last].map(u16::to_le_bytes);
            let entry = [3, start[0], start[1], 0, 4, end[0], end[1], 0];
            let table = ivrs(&[ivhd(0x10, 0, 0x1000, &[&entry])]);
            let found = Ivrs::new(&table).expect("a valid table").unit_of(0, device);
            prop_assert_eq!(found.map(|found| found.alias), inside.then_some(device));
            Ok(())
        })
        .expect("the property holds");
}

/// Reads everything of a table, whatever it is.
fn read_all(table: &[u8]) {
    let device = rid(0, 2, 0);
    let bridges = Bridges(vec![(device, 0, 255)]);
    if let Ok(table) = Dmar::new(table) {
        assert!(table.structures().count() <= 4096);
        table.unit_of(0, device, &bridges);
        assert!(table.reserved_regions(0, device, &bridges).count() <= 4096);
    }
    if let Ok(table) = Ivrs::new(table) {
        table.unit_of(0, device);
        assert!(
            table
                .units()
                .map(|unit| unit.devices().count())
                .sum::<usize>()
                <= 4096
        );
    }
    if let Ok(table) = Iort::new(table) {
        let found = table.unit_of(0, device);
        let _ = table.its_of(0, device);
        if let Ok(Some(stream)) = found {
            assert!(table.reserved_regions(&stream).count() <= 4096);
        }
    }
    if let Ok(table) = Rimt::new(table) {
        let _ = table.unit_of(0, device);
    }
    if let Ok(table) = Viot::new(table) {
        let _ = table.unit_of(0, device);
    }
    if let Ok(tree) = DeviceTree::new(table) {
        let _ = tree.unit_of(0, device);
        for device in tree.devices() {
            assert!(tree.units_of_device(&device).count() <= 17);
        }
    }
}

#[test]
fn no_change_of_a_table_makes_a_parser_panic() {
    let names = [
        "dmar-q35",
        "ivrs-q35",
        "iort-virt-two",
        "rimt-virt-pci",
        "viot-q35",
        "tree-riscv-iommu-sys",
        "tree-arm-virtio-iommu",
    ];
    let tables = names.map(fixture);
    let change = (any::<prop::sample::Index>(), any::<u8>());
    let changes = prop::collection::vec(change, 1..6);
    runner(5000)
        .run(&(0..tables.len(), changes), |(which, changes)| {
            let mut table = tables[which].clone();
            for (at, value) in changes {
                let at = at.index(table.len());
                table[at] = value;
            }
            read_all(&table);
            fix_checksum(&mut table);
            read_all(&table);
            Ok(())
        })
        .expect("no panic");
}
