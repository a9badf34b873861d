//! VIOT and RIMT: every node in golden bytes, lookups, and all errors.

mod common;

use common::{acpi, mapping, nodes, pci_range, rid, viot};
use ringfence_firmware::{
    Endpoint, FirmwareErrorKind, InterruptWire, IommuLocation, Rimt, RimtNodeKind, Viot, ViotNode,
    ViotUnit,
};
use ringfence_types::PhysAddr;

const MMIO_UNIT: [u8; 16] = [4, 0, 16, 0, 0, 0, 0, 0, 0x00, 0x02, 0x00, 0x0a, 0, 0, 0, 0];

const PCI_UNIT: [u8; 16] = [3, 0, 16, 0, 1, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// An MMIO endpoint with ID 0x42, which refers to the node at `output`.
fn mmio(output: u8) -> Vec<u8> {
    let mut node = vec![
        2, 0, 24, 0, 0x42, 0, 0, 0, 0x00, 0x00, 0x00, 0x0b, 0, 0, 0, 0,
    ];
    node.extend([output, 0, 0, 0, 0, 0, 0, 0]);
    node
}

/// Two units at 48 and 64, and devices behind them.
fn machine() -> Vec<u8> {
    viot(&[
        MMIO_UNIT.to_vec(),
        PCI_UNIT.to_vec(),
        pci_range(0x1000, [1, 2], [0x10, 0xff], 64),
        pci_range(0, [0, 0], [0, 0xffff], 48),
        mmio(48),
        vec![5, 0, 4, 0],
    ])
}

const IN_MEMORY: ViotUnit = ViotUnit::Mmio(PhysAddr::new(0x0a00_0200));

#[test]
fn viot_nodes_are_decoded() {
    let table = machine();
    let table = Viot::new(&table).expect("a valid table");
    let pci = ViotUnit::Pci {
        segment: 1,
        device: rid(0, 4, 0),
    };
    let all: Vec<_> = table.nodes().collect();
    assert_eq!(all[0], ViotNode::Unit(IN_MEMORY));
    assert_eq!(all[1], ViotNode::Unit(pci));
    let expected = ViotNode::PciRange {
        segments: [1, 2],
        devices: [rid(0, 2, 0), rid(0, 31, 7)],
        endpoint: 0x1000,
        output: 64,
    };
    assert_eq!(all[2], expected);
    let registers = PhysAddr::new(0x0b00_0000);
    assert_eq!(
        all[4],
        ViotNode::Mmio {
            registers,
            endpoint: 0x42,
            output: 48
        }
    );
    assert_eq!(all[5], ViotNode::Other(5));
    assert_eq!(table.units().collect::<Vec<_>>(), [IN_MEMORY, pci]);
}

#[test]
fn viot_lookups() {
    let table = machine();
    let table = Viot::new(&table).expect("a valid table");
    let pci = ViotUnit::Pci {
        segment: 1,
        device: rid(0, 4, 0),
    };
    let cases = [
        (0, rid(0, 0, 0), Some((IN_MEMORY, 0))),
        (0, rid(255, 31, 7), Some((IN_MEMORY, 0xffff))),
        (1, rid(0, 1, 7), None),
        (1, rid(0, 2, 0), Some((pci, 0x1000))),
        // A unit does not translate its own accesses.
        (1, rid(0, 4, 0), None),
        (1, rid(0, 31, 7), Some((pci, 0x10ef))),
        (1, rid(1, 0, 0), None),
        (2, rid(0, 4, 0), Some((pci, 0x1_1010))),
        (3, rid(0, 4, 0), None),
    ];
    for (segment, device, expected) in cases {
        let found = table.unit_of(segment, device).expect("sound references");
        let expected = expected.map(|(unit, id)| Endpoint { unit, id });
        assert_eq!(found, expected, "{segment} {device}");
    }
    let at = |address| {
        table
            .unit_of_mmio(PhysAddr::new(address))
            .expect("sound references")
    };
    assert_eq!(
        at(0x0b00_0000),
        Some(Endpoint {
            unit: IN_MEMORY,
            id: 0x42
        })
    );
    assert_eq!(at(0x0b00_1000), None);
}

#[test]
fn viot_errors() {
    use FirmwareErrorKind::{Range, Reference, StructureLength, Truncated};
    let cases = [
        (vec![1, 0, 0, 0], 48, StructureLength),
        (vec![1, 0, 3, 0], 48, StructureLength),
        (vec![9, 0, 5, 0], 48, Truncated),
        ([&[1, 0, 23, 0][..], &[0; 19]].concat(), 48, StructureLength),
        ([&[2, 0, 23, 0][..], &[0; 19]].concat(), 48, StructureLength),
        ([&[3, 0, 15, 0][..], &[0; 11]].concat(), 48, StructureLength),
        ([&[4, 0, 15, 0][..], &[0; 11]].concat(), 48, StructureLength),
        (pci_range(0, [1, 0], [0, 0], 48), 56, Range),
        (pci_range(0, [0, 0], [1, 0], 48), 56, Range),
        (pci_range(u32::MAX, [0, 0], [0, 1], 48), 56, Range),
    ];
    for (node, offset, kind) in cases {
        let error = Viot::new(&viot(&[node])).expect_err("a bad table");
        assert_eq!((error.offset, error.kind), (offset, kind));
    }
    for (count, first, offset) in [(1_u16, 48_u16, 48), (0, 49, 49)] {
        let table = acpi(b"VIOT", 0, &le![count, first, 0_u64], &[]);
        let error = Viot::new(&table).expect_err("a bad table");
        assert_eq!((error.offset, error.kind), (offset, Truncated));
    }
    // References between nodes, to a device, and to the node itself.
    for output in [49, 72, 48] {
        let table = viot(&[
            pci_range(0, [0, 0], [0, 0xffff], u16::from(output)),
            mmio(output),
        ]);
        let table = Viot::new(&table).expect("a valid table");
        let error = table.unit_of(0, rid(0, 0, 0)).expect_err("no unit");
        assert_eq!((error.offset, error.kind), (64, Reference));
        let error = table
            .unit_of_mmio(PhysAddr::new(0x0b00_0000))
            .expect_err("no unit");
        assert_eq!((error.offset, error.kind), (88, Reference));
    }
}

/// A node of RIMT with number 3.
fn rimt_node(kind: u8, fields: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + fields.len()).expect("a short node");
    let mut node = le![kind, 1_u8, length, 0_u16, 3_u16];
    node.extend(fields);
    node
}

/// A unit with flags, a segment and a device, and interrupt wires.
fn iommu(flags: u32, wires: u16, at: u16) -> Vec<u8> {
    let mut fields = b"RSCV0004".to_vec();
    fields.extend(le![
        0x0301_0000_u64,
        flags,
        6_u32,
        2_u16,
        0x0108_u16,
        wires,
        at
    ]);
    for wire in 0..wires {
        fields.extend(le![u32::from(wire) + 36, 3_u32]);
    }
    rimt_node(0, &fields)
}

fn rimt_root(segment: u16, flags: u32, mappings: &[Vec<u8>]) -> Vec<u8> {
    let count = u16::try_from(mappings.len()).expect("few mappings");
    let mut fields = le![flags, 0_u16, segment, 20_u16, count];
    fields.extend(mappings.concat());
    rimt_node(1, &fields)
}

fn rimt(all: &[Vec<u8>]) -> Vec<u8> {
    nodes(b"RIMT", 1, all)
}

#[test]
fn rimt_nodes_and_lookups() {
    let mut platform = le![20_u16, 1_u16];
    platform.extend(b"\\_SB.A\0\0");
    platform.extend(mapping(4, 2, 0x30, 48, 1));
    let table = rimt(&[
        iommu(2, 2, 40),
        iommu(1, 0, 0),
        rimt_root(
            1,
            3,
            &[mapping(0, 8, 0x100, 48, 0), mapping(9, 0xfff7, 9, 104, 0)],
        ),
        rimt_node(2, &platform),
        rimt_node(7, &[]),
    ]);
    let table = Rimt::new(&table).expect("a valid table");
    let units: Vec<_> = table.units().collect();
    assert_eq!(units[0].hardware_id, *b"RSCV0004");
    assert_eq!(
        units[0].location,
        IommuLocation::Platform(PhysAddr::new(0x0301_0000))
    );
    assert_eq!(units[0].proximity_domain, Some(6));
    let wire = |gsi| InterruptWire { gsi, flags: 3 };
    assert_eq!(units[0].wires().collect::<Vec<_>>(), [wire(36), wire(37)]);
    let pcie = IommuLocation::Pcie {
        segment: 2,
        device: rid(1, 1, 0),
    };
    assert_eq!((units[1].location, units[1].proximity_domain), (pcie, None));
    let all: Vec<_> = table.nodes().collect();
    assert_eq!(all[2].id, 3);
    let root = RimtNodeKind::RootComplex {
        segment: 1,
        ats: true,
        pri: true,
    };
    assert_eq!(all[2].kind, root);
    assert_eq!(
        all[3].kind,
        RimtNodeKind::PlatformDevice { name: b"\\_SB.A" }
    );
    assert_eq!(all[4].kind, RimtNodeKind::Other(7));
    let lookup = |segment, device| {
        let found = table.unit_of(segment, device).expect("sound references");
        found.map(|found| (found.unit.location, found.id))
    };
    let first = units[0].location;
    assert_eq!(lookup(1, rid(0, 0, 7)), Some((first, 0x107)));
    assert_eq!(lookup(1, rid(0, 1, 0)), None);
    assert_eq!(lookup(1, rid(0, 1, 1)), Some((pcie, 9)));
    assert_eq!(lookup(1, rid(255, 31, 7)), Some((pcie, 0xffff)));
    assert_eq!(lookup(0, rid(0, 0, 0)), None);
    let of_platform = |id| table.map(&all[3], id).expect("sound references");
    assert_eq!(of_platform(5).map(|found| found.id), Some(0x31));
    assert_eq!(of_platform(6), None);
}

#[test]
fn rimt_errors() {
    use FirmwareErrorKind::{Range, Reference, StructureLength, Truncated, Unterminated};
    let root = |mapping| rimt_root(0, 0, &[mapping]);
    let mut far = rimt_root(0, 0, &[]);
    far[18] = 1;
    let cases = [
        (rimt_node(0, &[0; 31]), 48, StructureLength),
        (rimt_node(1, &[0; 11]), 48, StructureLength),
        (rimt_node(2, &[0; 4]), 48, StructureLength),
        (rimt_node(2, &[0, 0, 0, 0, 1]), 60, Unterminated),
        (iommu(0, 1, 41), 89, Truncated),
        (root(mapping(0, 0, 0, 48, 0)), 72, Range),
        (root(mapping(u32::MAX, 2, 0, 48, 0)), 72, Range),
        (root(mapping(0, 2, u32::MAX, 48, 0)), 72, Range),
        (root(mapping(0, 2, 0, 88, 0)), 80, Reference),
        (far, 68, Truncated),
        (vec![0, 1, 7, 0, 0, 0, 0, 0], 48, StructureLength),
        (vec![0, 1, 0, 0, 0, 0, 0, 0], 48, StructureLength),
        (vec![0, 1, 9, 0, 0, 0, 0, 0], 48, Truncated),
    ];
    for (node, offset, kind) in cases {
        let error = Rimt::new(&rimt(std::slice::from_ref(&node))).expect_err("a bad table");
        assert_eq!((error.offset, error.kind), (offset, kind), "{node:?}");
    }
    let table = acpi(b"RIMT", 1, &le![0_u32, 49_u32, 0_u32], &[]);
    let error = Rimt::new(&table).expect_err("a bad table");
    assert_eq!((error.offset, error.kind), (49, Truncated));
    // References to the root complex itself and into a node.
    for reference in [48, 50] {
        let table = rimt(&[root(mapping(0, 0x1_0000, 0, reference, 0))]);
        let table = Rimt::new(&table).expect("a valid table");
        let error = table.unit_of(0, rid(0, 0, 0)).expect_err("no unit");
        assert_eq!((error.offset, error.kind), (48, Reference));
    }
}
