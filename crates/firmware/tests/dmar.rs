//! DMAR: every structure in golden bytes, the precedence of scopes, and all errors.

mod common;

use common::{Bridges, dmar, drhd, fix_checksum, remapping, rid, rmrr, scope};
use ringfence_firmware::{
    Dmar, DmarStructure, FirmwareError, FirmwareErrorKind, NoBridges, PathHop, ScopeKind, Treatment,
};
use ringfence_types::{Iova, IovaRange, Permissions, PhysAddr, RequesterId};

/// One structure of each type, byte by byte (VT-d specification, chapter 8).
const STRUCTURES: &[&[u8]] = &[
    // DRHD: size 2^1 pages, segment 2, registers at 0xfed9_1000; one I/O APIC behind 00:1e.7.
    &[0, 0, 24, 0, 0, 1, 2, 0, 0x00, 0x10, 0xd9, 0xfe, 0, 0, 0, 0],
    &[3, 8, 0, 0, 2, 0xf0, 0x1e, 7],
    // RMRR: segment 1, 0x7b80_0000 to 0x7fff_ffff; the bridge 00:02.0 and the endpoint behind it.
    &[1, 0, 42, 0, 0, 0, 1, 0],
    &[
        0, 0, 0x80, 0x7b, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0,
    ],
    &[2, 8, 0, 0, 0, 0, 2, 0, 1, 10, 0, 0, 0, 0, 2, 0, 3, 1],
    // ATSR: all ports of segment 3.
    &[2, 0, 8, 0, 1, 0, 3, 0],
    // RHSA: the unit at 0xfed9_0000 is in proximity domain 4.
    &[
        3, 0, 20, 0, 0, 0, 0, 0, 0x00, 0x00, 0xd9, 0xfe, 0, 0, 0, 0, 4, 0, 0, 0,
    ],
    // ANDD: device 9 is \_SB.A.
    &[
        4, 0, 15, 0, 0, 0, 0, 9, b'\\', b'_', b'S', b'B', b'.', b'A', 0,
    ],
    // SATC: required, segment 0, 00:03.0.
    &[5, 0, 16, 0, 1, 0, 0, 0, 1, 8, 0, 0, 0, 0, 3, 0],
    // SIDP: segment 5, 00:04.0 with flags 6.
    &[6, 0, 16, 0, 0, 0, 5, 0, 1, 8, 6, 0, 0, 0, 4, 0],
    // A reserved type.
    &[9, 1, 4, 0],
];

fn golden() -> Vec<u8> {
    dmar(&[STRUCTURES.concat()])
}

#[test]
fn every_structure_is_decoded() {
    let table = golden();
    let table = Dmar::new(&table).expect("a valid table");
    assert_eq!(table.header.oem_id, *b"RINGFE");
    assert_eq!(table.header.oem_table_id, *b"TESTBENC");
    assert_eq!((table.header.revision, table.header.oem_revision), (1, 1));
    assert_eq!(table.host_address_width, 39);
    let structures: Vec<_> = table.structures().collect();
    assert_eq!(structures.len(), 8);
    let DmarStructure::Drhd(unit) = structures[0] else {
        panic!("{:?}", structures[0]);
    };
    assert_eq!((unit.segment, unit.include_pci_all), (2, false));
    assert_eq!(unit.registers, PhysAddr::new(0xfed9_1000));
    assert_eq!(unit.register_bytes, 8192);
    let ioapic = unit.devices.iter().next().expect("a scope");
    assert_eq!(ioapic.kind, ScopeKind::IoApic);
    assert_eq!((ioapic.enumeration_id, ioapic.start_bus), (2, 0xf0));
    assert_eq!(ioapic.resolve(2, &NoBridges), Some(rid(0xf0, 0x1e, 7)));
    let DmarStructure::Rmrr(region) = structures[1] else {
        panic!("{:?}", structures[1]);
    };
    assert_eq!(region.segment, 1);
    let range = IovaRange::inclusive(Iova::new(0x7b80_0000), Iova::new(0x7fff_ffff));
    assert_eq!(Some(region.range), range);
    let path = |index: usize| -> Vec<PathHop> {
        let scope = region.devices.iter().nth(index).expect("a scope");
        scope.path().collect()
    };
    let hop = |device, function| PathHop { device, function };
    assert_eq!(path(0), [hop(2, 0)]);
    assert_eq!(path(1), [hop(2, 0), hop(3, 1)]);
    let DmarStructure::Atsr {
        segment, all_ports, ..
    } = structures[2]
    else {
        panic!("{:?}", structures[2]);
    };
    assert_eq!((segment, all_ports), (3, true));
    let expected = DmarStructure::Rhsa {
        registers: PhysAddr::new(0xfed9_0000),
        proximity_domain: 4,
    };
    assert_eq!(structures[3], expected);
    let expected = DmarStructure::Andd {
        number: 9,
        name: b"\\_SB.A",
    };
    assert_eq!(structures[4], expected);
    let DmarStructure::Satc {
        segment,
        required,
        devices,
    } = structures[5]
    else {
        panic!("{:?}", structures[5]);
    };
    assert_eq!((segment, required), (0, true));
    assert!(devices.cover(0, rid(0, 3, 0), &NoBridges));
    let DmarStructure::Sidp { segment, devices } = structures[6] else {
        panic!("{:?}", structures[6]);
    };
    assert_eq!(
        (segment, devices.iter().next().map(|scope| scope.flags)),
        (5, Some(6))
    );
    assert_eq!(structures[7], DmarStructure::Other(0x109));
}

#[test]
fn flags_of_the_platform() {
    // x2APIC opt-out is valid with interrupt remapping only.
    let cases = [
        (0, [false, false, false]),
        (1, [true, false, false]),
        (2, [false, false, false]),
        (3, [true, true, false]),
        (4, [false, false, true]),
    ];
    for (flags, expected) in cases {
        let mut table = golden();
        table[37] = flags;
        fix_checksum(&mut table);
        let flags = Dmar::new(&table).expect("a valid table").flags;
        let found = [
            flags.interrupt_remapping(),
            flags.x2apic_opt_out(),
            flags.dma_control(),
        ];
        assert_eq!(found, expected);
    }
}

/// A bridge at 00:1c.0 with bus 1 to 3, and in it a bridge at 01:00.0 with bus 2.
fn bridges() -> Bridges {
    Bridges(vec![(rid(0, 0x1c, 0), 1, 3), (rid(1, 0, 0), 2, 2)])
}

#[test]
fn explicit_scope_takes_precedence_over_include_pci_all() {
    let all = |segment, registers| drhd(1, segment, registers, &[]);
    let table = dmar(&[
        all(0, 0x1000),
        drhd(0, 0, 0x2000, &[scope(1, 0, 0, &[(2, 0)])]),
        drhd(0, 0, 0x3000, &[scope(2, 0, 0, &[(0x1c, 0)])]),
        drhd(0, 0, 0x4000, &[scope(1, 0, 0, &[(0x1d, 0), (0, 0)])]),
        drhd(
            0,
            0,
            0x5000,
            &[scope(5, 0, 0, &[(7, 0)]), scope(9, 0, 0, &[(8, 0)])],
        ),
        all(1, 0x6000),
    ]);
    let table = Dmar::new(&table).expect("a valid table");
    let unit = |segment, device| {
        let unit = table.unit_of(segment, device, &bridges());
        unit.map(|unit| unit.registers.get())
    };
    let cases = [
        (0, rid(0, 2, 0), Some(0x2000)),
        // Another function, and the same device of another segment.
        (0, rid(0, 2, 1), Some(0x1000)),
        (1, rid(0, 2, 0), Some(0x6000)),
        // The bridge, and its buses from the first to the last.
        (0, rid(0, 0x1c, 0), Some(0x3000)),
        (0, rid(1, 0, 0), Some(0x3000)),
        (0, rid(3, 31, 7), Some(0x3000)),
        (0, rid(4, 0, 0), Some(0x1000)),
        // 00:1d.0 is no bridge, so the path behind it names nothing.
        (0, rid(0, 0x1d, 0), Some(0x1000)),
        // Scopes of other kinds name no requester IDs.
        (0, rid(0, 7, 0), Some(0x1000)),
        (0, rid(0, 8, 0), Some(0x1000)),
        (2, rid(0, 2, 0), None),
    ];
    for (segment, device, expected) in cases {
        assert_eq!(unit(segment, device), expected, "{segment} {device}");
    }
}

#[test]
fn a_path_leads_through_secondary_buses() {
    let path = &[(0x1c, 0), (0, 0), (5, 1)];
    let table = dmar(&[drhd(0, 0, 0x1000, &[scope(1, 0, 0, path)])]);
    let table = Dmar::new(&table).expect("a valid table");
    let found = |device| table.unit_of(0, device, &bridges()).is_some();
    assert!(found(rid(2, 5, 1)));
    assert!(!found(rid(0, 5, 1)));
    assert!(!found(rid(1, 5, 1)));
    assert!(table.unit_of(0, rid(2, 5, 1), &NoBridges).is_none());
}

#[test]
fn an_rmrr_is_reserved_for_its_devices() {
    let devices = [scope(1, 0, 0, &[(2, 0)])];
    let table = dmar(&[
        rmrr(0, 0x1000, 0x1fff, &devices),
        rmrr(0, 0x8000, 0x8fff, &[scope(1, 0, 0, &[(3, 0)])]),
        rmrr(1, 0x9000, 0x9fff, &devices),
        rmrr(0, 0x4000, 0x4fff, &devices),
    ]);
    let table = Dmar::new(&table).expect("a valid table");
    let regions: Vec<_> = table.reserved_regions(0, rid(0, 2, 0), NoBridges).collect();
    let starts: Vec<_> = regions
        .iter()
        .map(|region| region.range.start().get())
        .collect();
    assert_eq!(starts, [0x1000, 0x4000]);
    let identity = Treatment::Identity(Permissions::READ_WRITE);
    assert!(regions.iter().all(|region| region.treatment == identity));
}

fn error(table: &[u8]) -> (usize, FirmwareErrorKind) {
    let FirmwareError { offset, kind } = Dmar::new(table).expect_err("a bad table");
    (offset, kind)
}

#[test]
fn errors_of_the_header() {
    use FirmwareErrorKind::{Checksum, Revision, Signature, TableLength, Truncated};
    let sound = golden();
    assert!(Dmar::new(&[sound.as_slice(), &[1, 2, 3]].concat()).is_ok());
    for end in 0..sound.len() {
        let expected = if end < 36 {
            (0, Truncated)
        } else {
            (4, Truncated)
        };
        assert_eq!(error(&sound[..end]), expected, "{end}");
    }
    let cases: [(usize, u8, usize, FirmwareErrorKind); 4] = [
        (0, b'X', 0, Signature),
        (4, 35, 4, TableLength),
        (20, b'X', 9, Checksum),
        (8, 0, 8, Revision),
    ];
    for (at, value, offset, kind) in cases {
        let mut table = sound.clone();
        table[at] = value;
        if kind == Revision {
            fix_checksum(&mut table);
        }
        assert_eq!(error(&table), (offset, kind), "{at}");
    }
    // The header alone is a table without its fields.
    let mut table = sound[..40].to_vec();
    common::seal(&mut table);
    assert_eq!(error(&table), (48, Truncated));
}

#[test]
fn errors_of_structures() {
    use FirmwareErrorKind::{DevicePath, Range, StructureLength, Truncated, Unterminated};
    let unit = |scope: Vec<u8>| drhd(0, 0, 0x1000, &[scope]);
    let cases = [
        // Lengths of structures: 0, less than a header, less than the fields, past the table.
        (vec![0, 0, 0, 0], 48, StructureLength),
        (vec![0, 0, 3, 0], 48, StructureLength),
        (vec![0, 0, 4, 0], 48, StructureLength),
        (vec![0, 0, 5, 0], 48, Truncated),
        (vec![0, 0], 48, Truncated),
        (remapping(0, &[0; 11], &[]), 48, StructureLength),
        (remapping(1, &[0; 19], &[]), 48, StructureLength),
        (remapping(2, &[0; 3], &[]), 48, StructureLength),
        (remapping(3, &[0; 15], &[]), 48, StructureLength),
        (remapping(4, &[0; 4], &[]), 48, StructureLength),
        (remapping(5, &[0; 3], &[]), 48, StructureLength),
        (remapping(6, &[0; 3], &[]), 48, StructureLength),
        // The second structure.
        (
            [drhd(1, 0, 0, &[]), vec![0, 0, 2, 0]].concat(),
            64,
            StructureLength,
        ),
        (rmrr(0, 0x2000, 0x1fff, &[]), 56, Range),
        (remapping(4, b"\0\0\0\x01AB", &[]), 56, Unterminated),
        // Scopes: length 0, no path, half a step, past the structure.
        (unit(vec![1, 0, 0, 0, 0, 0]), 64, StructureLength),
        (unit(vec![1, 6, 0, 0, 0, 0]), 64, StructureLength),
        (unit(vec![1, 7, 0, 0, 0, 0, 0]), 64, StructureLength),
        (unit(vec![1, 8, 0, 0, 0, 0, 0]), 64, Truncated),
        (unit(vec![1]), 64, Truncated),
        (unit(scope(1, 0, 0, &[(31, 7), (32, 0)])), 72, DevicePath),
        (unit(scope(2, 0, 0, &[(0, 8)])), 70, DevicePath),
    ];
    for (structures, offset, kind) in cases {
        assert_eq!(error(&dmar(&[structures])), (offset, kind));
    }
    // The meaning of a reserved scope's path is unknown.
    assert!(Dmar::new(&dmar(&[unit(scope(9, 0, 0, &[(32, 9)]))])).is_ok());
}

#[test]
fn an_error_names_its_offset() {
    let error = Dmar::new(&dmar(&[vec![0, 0, 0, 0]])).expect_err("a bad table");
    let expected = "offset 0x30: the length does not fit the structure's type";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_path_of_full_length_ends() {
    // Every bridge leads to itself again.
    let path = vec![(0, 0); 124];
    let table = dmar(&[drhd(0, 0, 0x1000, &[scope(2, 0, 0, &path)])]);
    let table = Dmar::new(&table).expect("a valid table");
    let looped = Bridges(vec![(RequesterId::new(0), 0, 0)]);
    assert!(table.unit_of(0, rid(0, 9, 0), &looped).is_some());
}
