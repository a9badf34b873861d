//! IORT: every node, the way of IDs along references, reserved memory, and all errors.

mod common;

use common::{acpi, iort_node, mapping, nodes, rid, root_complex, smmu_v3};
use ringfence_firmware::{FirmwareErrorKind, Iort, IortNodeKind, MAX_HOPS, Treatment};
use ringfence_types::{Permissions, PhysAddr, RequesterId};

fn iort(all: &[Vec<u8>]) -> Vec<u8> {
    nodes(b"IORT", 5, all)
}

/// An ITS group of two services, of 28 bytes.
fn its_group() -> Vec<u8> {
    iort_node(0, 1, &le![2_u32, 5_u32, 6_u32], &[])
}

/// An SMMU of version 2.
fn smmu(registers: u64) -> Vec<u8> {
    let mut fields = le![registers, 0x2_0000_u64, 1_u32, 3_u32];
    fields.extend([0; 20]);
    iort_node(3, 3, &fields, &[])
}

fn named(name: &[u8], mappings: &[Vec<u8>]) -> Vec<u8> {
    let mut fields = le![3_u32, 0x11_u64, 44_u8];
    fields.extend(name);
    iort_node(1, 4, &fields, mappings)
}

/// Reserved memory with ranges of a start and a length.
fn rmr(flags: u32, ranges: &[(u64, u64)], mappings: &[Vec<u8>]) -> Vec<u8> {
    let at = u32::try_from(28).expect("small");
    let mut fields = le![flags, u32::try_from(ranges.len()).expect("few"), at];
    for (start, bytes) in ranges {
        fields.extend(le![*start, *bytes, 0_u32]);
    }
    iort_node(6, 3, &fields, mappings)
}

#[test]
fn every_node_is_decoded() {
    let table = iort(&[
        its_group(),
        named(b"\\_SB.A\0\0", &[]),
        root_complex(0x1_0002, &[mapping(0, 0xffff, 0x1_0000, 48, 0)]),
        smmu(0x1000_0000),
        smmu_v3(0x2000_0000, 0b1001, &[]),
        iort_node(
            5,
            2,
            &le![0x3000_0000_u64, 77_u32, 48_u32, 0x3001_0000_u64],
            &[],
        ),
        rmr(0b11, &[(0x4000_0000, 0x1000), (0x5000_0000, 0x10)], &[]),
        iort_node(9, 0, &[], &[]),
    ]);
    let table = Iort::new(&table).expect("a valid table");
    let all: Vec<_> = table.nodes().collect();
    assert_eq!(all.len(), 8);
    assert!(all.iter().all(|node| node.identifier == 7));
    let IortNodeKind::ItsGroup(group) = all[0].kind else {
        panic!("{:?}", all[0]);
    };
    assert_eq!(group.identifiers().collect::<Vec<_>>(), [5, 6]);
    let expected = IortNodeKind::NamedComponent {
        flags: 3,
        memory_properties: 0x11,
        address_limit: 44,
        name: b"\\_SB.A",
    };
    assert_eq!((all[1].kind, all[1].revision), (expected, 4));
    let IortNodeKind::RootComplex(root) = all[2].kind else {
        panic!("{:?}", all[2]);
    };
    assert_eq!(
        (root.segment, root.ats, root.address_limit),
        (0x1_0002, 1, Some(48))
    );
    let mapping = all[2].mappings().next().expect("a mapping");
    assert_eq!(
        (mapping.first, mapping.last, mapping.output),
        (0, 0xffff, 0x1_0000)
    );
    assert_eq!((mapping.reference, mapping.flags), (48, 0));
    let expected = IortNodeKind::Smmu {
        registers: PhysAddr::new(0x1000_0000),
        span: 0x2_0000,
        model: 1,
        flags: 3,
    };
    assert_eq!(all[3].kind, expected);
    let IortNodeKind::SmmuV3(unit) = all[4].kind else {
        panic!("{:?}", all[4]);
    };
    assert_eq!(
        (unit.registers, unit.flags),
        (PhysAddr::new(0x2000_0000), 9)
    );
    assert_eq!(
        (unit.gsivs, unit.proximity_domain),
        ([10, 11, 12, 13], Some(5))
    );
    let expected = IortNodeKind::Pmcg {
        pages: [PhysAddr::new(0x3000_0000), PhysAddr::new(0x3001_0000)],
        overflow_gsiv: 77,
        reference: 48,
    };
    assert_eq!(all[5].kind, expected);
    let IortNodeKind::Rmr(region) = all[6].kind else {
        panic!("{:?}", all[6]);
    };
    assert!(region.remap_permitted());
    let starts: Vec<_> = region.ranges().map(|range| range.start().get()).collect();
    assert_eq!(starts, [0x4000_0000, 0x5000_0000]);
    assert_eq!(all[7].kind, IortNodeKind::Other(9));
    assert_eq!(table.units().count(), 2);
}

/// An ITS group at 48, an SMMUv3 at 76 with 108 bytes, and root complexes.
fn machine() -> Vec<u8> {
    let single = mapping(0, 0, 0x99, 48, 1);
    iort(&[
        its_group(),
        smmu_v3(
            0x2000_0000,
            0,
            &[single, mapping(0x100, 0xff, 0x5000, 48, 0)],
        ),
        // Bus 0 and device 01:00.0 behind the SMMU; bus 2 directly at the ITS group.
        root_complex(
            0,
            &[
                mapping(0, 0xff, 0x100, 76, 0),
                mapping(0x100, 0, 0x1ff, 76, 0),
            ],
        ),
        root_complex(0, &[mapping(0x200, 0xff, 0x7000, 48, 0)]),
        named(b"\\DEV\0", &[mapping(9, 9, 0x142, 76, 1)]),
    ])
}

#[test]
fn ids_are_mapped_along_the_references() {
    let table = machine();
    let table = Iort::new(&table).expect("a valid table");
    let both = |segment, device| {
        let unit = table.unit_of(segment, device).expect("a sound way");
        let its = table.its_of(segment, device).expect("a sound way");
        (unit.map(|unit| unit.id), its.map(|its| its.id))
    };
    // The SMMU's single mapping is for its own interrupts.
    assert_eq!(both(0, rid(0, 0, 0)), (Some(0x100), Some(0x5000)));
    assert_eq!(both(0, rid(0, 31, 7)), (Some(0x1ff), Some(0x50ff)));
    assert_eq!(both(0, rid(1, 0, 0)), (Some(0x1ff), Some(0x50ff)));
    assert_eq!(both(0, rid(1, 0, 1)), (None, None));
    assert_eq!(both(0, rid(2, 0, 1)), (None, Some(0x7001)));
    assert_eq!(both(1, rid(0, 0, 0)), (None, None));
    let unit = table
        .unit_of(0, rid(0, 0, 0))
        .expect("a sound way")
        .expect("a unit");
    assert_eq!(unit.unit, table.units().next().expect("a unit"));
    // A named component with a single mapping ignores its input.
    let component = table.nodes().last().expect("a node");
    for input in [0, 9, u32::MAX] {
        let unit = table.unit_of_node(&component, input).expect("a sound way");
        assert_eq!(unit.map(|unit| unit.id), Some(0x142));
    }
}

#[test]
fn an_rmr_is_reserved_for_the_streams_of_its_mappings() {
    let streams = |first, more, reference| mapping(0, more, first, reference, 0);
    let table = iort(&[
        smmu_v3(0x1000_0000, 0, &[]),
        smmu_v3(0x2000_0000, 0, &[]),
        root_complex(0, &[mapping(0, 0xffff, 0, 48, 0)]),
        rmr(0, &[(0x8000_0000, 0x1000)], &[streams(0x10, 3, 48)]),
        rmr(
            1,
            &[(0x9000_0000, 0x1000), (0xa000_0000, 0x1000)],
            &[streams(0x50, 0, 116), streams(0x13, 0, 48)],
        ),
        rmr(0, &[(0xb000_0000, 0x1000)], &[streams(0x13, 0, 116)]),
    ]);
    let table = Iort::new(&table).expect("a valid table");
    let regions = |device| -> Vec<_> {
        let stream = table
            .unit_of(0, RequesterId::new(device))
            .expect("a sound way");
        let stream = stream.expect("a unit");
        let regions = table.reserved_regions(&stream);
        regions
            .map(|region| (region.range.start().get(), region.treatment))
            .collect()
    };
    let fixed = Treatment::Identity(Permissions::READ_WRITE);
    let movable = Treatment::IdentityUntilMoved(Permissions::READ_WRITE);
    assert_eq!(regions(0x0f), []);
    assert_eq!(regions(0x10), [(0x8000_0000, fixed)]);
    let both = [
        (0x8000_0000, fixed),
        (0x9000_0000, movable),
        (0xa000_0000, movable),
    ];
    assert_eq!(regions(0x13), both);
    assert_eq!(regions(0x14), []);
    assert_eq!(regions(0x50), []);
}

#[test]
fn an_rmr_of_an_old_table_is_ignored() {
    let table = nodes(b"IORT", 3, &[rmr(0, &[], &[])]);
    let table = Iort::new(&table).expect("a valid table");
    assert_eq!(
        table.nodes().map(|node| node.kind).last(),
        Some(IortNodeKind::Other(6))
    );
}

#[test]
fn a_loop_of_references_ends() {
    assert_eq!(MAX_HOPS, 8);
    // A root complex at 48 that refers to itself, and two that refer to each other.
    let own = |reference| root_complex(0, &[mapping(0, 0xffff, 0, reference, 0)]);
    for all in [vec![own(48)], vec![own(104), own(48)]] {
        let table = iort(&all);
        let table = Iort::new(&table).expect("a valid table");
        for error in [
            table.unit_of(0, rid(0, 0, 0)).expect_err("a loop"),
            table.its_of(0, rid(0, 0, 0)).expect_err("a loop"),
        ] {
            assert_eq!(error.kind, FirmwareErrorKind::TooManyHops);
        }
    }
}

#[test]
fn a_reference_between_nodes_is_an_error() {
    let table = iort(&[root_complex(0, &[mapping(0, 0xffff, 0, 49, 0)])]);
    let table = Iort::new(&table).expect("a valid table");
    let error = table.unit_of(0, rid(0, 0, 0)).expect_err("no node");
    assert_eq!(
        (error.offset, error.kind),
        (48, FirmwareErrorKind::Reference)
    );
}

#[test]
fn errors() {
    use FirmwareErrorKind::{Range, Reference, StructureLength, Truncated, Unterminated};
    let mapped = |mapping| root_complex(0, &[mapping]);
    let with_count = |count: u32, at: u32| {
        let mut node = root_complex(0, &[]);
        node[8..12].copy_from_slice(&count.to_le_bytes());
        node[12..16].copy_from_slice(&at.to_le_bytes());
        node
    };
    let cases = [
        (iort_node(0, 1, &[], &[]), 48, StructureLength),
        (iort_node(0, 1, &le![1_u32], &[]), 68, Truncated),
        (iort_node(0, 1, &le![u32::MAX], &[]), 68, Truncated),
        (iort_node(1, 1, &[0; 13], &[]), 48, StructureLength),
        (named(b"abc", &[]), 77, Unterminated),
        (iort_node(2, 0, &[0; 15], &[]), 48, StructureLength),
        (iort_node(2, 1, &[0; 16], &[]), 80, Truncated),
        (iort_node(3, 1, &[0; 43], &[]), 48, StructureLength),
        (iort_node(4, 1, &[0; 43], &[]), 48, StructureLength),
        (iort_node(4, 1, &[8; 44], &[]), 108, Truncated),
        (iort_node(5, 1, &[0; 23], &[]), 48, StructureLength),
        (iort_node(6, 1, &[0; 11], &[]), 48, StructureLength),
        (
            iort_node(6, 1, &le![0_u32, 1_u32, 28_u32], &[]),
            76,
            Truncated,
        ),
        (
            iort_node(6, 1, &le![0_u32, u32::MAX, u32::MAX], &[]),
            // An offset that does not fit 32 bits is reported as the largest one.
            48_usize.saturating_add(0xffff_ffff),
            Truncated,
        ),
        (rmr(0, &[(0x1000, 0)], &[]), 76, Range),
        (rmr(0, &[(0, 1), (u64::MAX, 2)], &[]), 96, Range),
        (mapped(mapping(u32::MAX, 1, 0, 48, 0)), 88, Range),
        (mapped(mapping(0, 1, u32::MAX, 48, 0)), 88, Range),
        (mapped(mapping(0, 1, 0, 104, 0)), 96, Reference),
        (with_count(1, 36), 84, Truncated),
        (with_count(u32::MAX, 16), 64, Truncated),
        (
            vec![9, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            48,
            StructureLength,
        ),
        (
            vec![9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            48,
            StructureLength,
        ),
        (
            vec![9, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            48,
            Truncated,
        ),
    ];
    for (node, offset, kind) in cases {
        let error = Iort::new(&iort(std::slice::from_ref(&node))).expect_err("a bad table");
        assert_eq!((error.offset, error.kind), (offset, kind), "{node:?}");
    }
    // More nodes than the table has, and nodes past its end.
    for (count, first, offset) in [(1_u32, 48_u32, 48), (0, 49, 49), (0, u32::MAX, 0xffff_ffff)] {
        let table = acpi(b"IORT", 5, &le![count, first, 0_u32], &[]);
        let error = Iort::new(&table).expect_err("a bad table");
        assert_eq!((error.offset, error.kind), (offset, Truncated));
    }
}
