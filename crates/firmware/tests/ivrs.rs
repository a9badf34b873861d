//! IVRS: every entry and block in golden bytes, the choice of entries, and all errors.

mod common;

use common::{acpi, ivhd, ivmd, ivrs, rid};
use ringfence_firmware::{
    AcpiUid, DeviceEntryKind, FirmwareErrorKind, Ivrs, IvrsBlock, SpecialDevice, Treatment,
};
use ringfence_types::{Permissions, PhysAddr, RequesterId};

/// One entry of each type (AMD I/O Virtualization specification, section 5.2.2).
const ENTRIES: &[&[u8]] = &[
    &[0, 0, 0, 0],
    &[1, 0, 0, 0x10],
    &[2, 0x08, 0x01, 0x20],
    &[3, 0x10, 0x01, 0x30, 4, 0x17, 0x01, 0],
    &[64, 0, 0, 0, 0, 0, 0, 0],
    &[66, 0x20, 0x02, 0x40, 0, 0xa5, 0x00, 0],
    &[67, 0x00, 0x03, 0x50, 0, 0xa6, 0x00, 0, 4, 0xff, 0x03, 0],
    &[70, 0x30, 0x04, 0x60, 0, 0, 0, 0x80],
    &[71, 0x00, 0x05, 0x70, 1, 0, 0, 0, 4, 0x0f, 0x05, 0],
    &[72, 0, 0, 0xd7, 33, 0xa0, 0x00, 1],
    &[72, 0, 0, 0, 0, 0xa2, 0x00, 2],
    &[240, 0x98, 0x00, 0x80],
    b"AMDI0040COMPATID\0\0",
    &[240, 0x99, 0x00, 0],
    b"AMDI0041\0\0\0\0\0\0\0\0\x01\x08\x07\0\0\0\0\0\0\0",
    &[240, 0x9a, 0x00, 0],
    b"AMDI0042\0\0\0\0\0\0\0\0\x02\x03abc",
    &[5, 0, 0, 0],
    &[72, 0, 0, 0, 1, 0xa3, 0x00, 9],
];

#[test]
fn every_entry_is_decoded() {
    use DeviceEntryKind::{AcpiDevice, All, Other, Range, Select, Special};
    let table = ivrs(&[ivhd(0x40, 0, 0xfd40_0000, ENTRIES)]);
    let table = Ivrs::new(&table).expect("a valid table");
    let unit = table.units().next().expect("a unit");
    let device = RequesterId::new;
    let select = |at, alias| Select {
        device: device(at),
        alias: device(alias),
    };
    let range = |first, last, alias: Option<u16>| Range {
        first: device(first),
        last: device(last),
        alias: alias.map(device),
    };
    let special = |handle, alias, variety| Special {
        handle,
        alias: device(alias),
        variety,
    };
    let acpi_device = |at, hid: &[u8; 8], cid: &[u8; 8], uid| AcpiDevice {
        device: device(at),
        hid: *hid,
        cid: *cid,
        uid,
    };
    let expected = [
        (All, 0x10, 0),
        (select(0x108, 0x108), 0x20, 0),
        (range(0x110, 0x117, None), 0x30, 0),
        (select(0x220, 0xa5), 0x40, 0),
        (range(0x300, 0x3ff, Some(0xa6)), 0x50, 0),
        (select(0x430, 0x430), 0x60, 0x8000_0000),
        (range(0x500, 0x50f, None), 0x70, 1),
        (special(33, 0xa0, SpecialDevice::IoApic), 0xd7, 0),
        (special(0, 0xa2, SpecialDevice::Hpet), 0, 0),
        (
            acpi_device(0x98, b"AMDI0040", b"COMPATID", AcpiUid::Absent),
            0x80,
            0,
        ),
        (
            acpi_device(0x99, b"AMDI0041", &[0; 8], AcpiUid::Integer(7)),
            0,
            0,
        ),
        (
            acpi_device(0x9a, b"AMDI0042", &[0; 8], AcpiUid::Text(b"abc")),
            0,
            0,
        ),
        (Other(5), 0, 0),
        (special(1, 0xa3, SpecialDevice::Other(9)), 0, 0),
    ];
    let found: Vec<_> = unit.devices().collect();
    let facts = found
        .iter()
        .map(|entry| (entry.kind, entry.settings, entry.extended));
    let facts: Vec<_> = facts.into_iter().collect();
    assert_eq!(facts, expected);
}

#[test]
fn header_and_unit_are_decoded() {
    let table = ivrs(&[
        ivhd(0x10, 3, 0xfd40_0000, &[]),
        ivhd(0x11, 3, 0xfd50_0000, &[]),
    ]);
    let table = Ivrs::new(&table).expect("a valid table");
    let info = table.info;
    assert!(info.efr_images() && !info.dma_control() && info.hypertransport_reserved());
    assert_eq!((info.physical_width(), info.virtual_width()), (48, 64));
    let blocks: Vec<_> = table.blocks().collect();
    let [IvrsBlock::Hardware(old), IvrsBlock::Hardware(new)] = blocks[..] else {
        panic!("{blocks:?}");
    };
    assert_eq!((old.kind, old.efr), (0x10, None));
    assert_eq!(
        (new.kind, new.efr),
        (0x11, Some([0x246_577e_fa22_54fa, 0x10]))
    );
    assert_eq!(
        (new.flags, new.device, new.capability),
        (0xb0, rid(0, 0, 2), 0x40)
    );
    assert_eq!(
        (new.segment, new.info, new.features),
        (3, 0x100, 0x8000_0000)
    );
    assert_eq!(new.registers, PhysAddr::new(0xfd50_0000));
    // Software ignores the blocks of lower types.
    assert_eq!(table.units().collect::<Vec<_>>(), [new]);
}

#[test]
fn the_last_entry_that_names_a_device_wins() {
    let table = ivrs(&[
        ivhd(0x10, 0, 0x9000, &[&[2, 9, 9, 0]]),
        ivhd(0x11, 0, 0x1000, &[&[1, 0, 0, 1], &[2, 0x08, 0, 2]]),
        ivhd(
            0x11,
            0,
            0x2000,
            &[
                &[3, 0x00, 1, 3, 4, 0xff, 1, 0],
                &[66, 0x10, 1, 4, 0, 0x11, 1, 0],
                &[67, 0x00, 2, 5, 0, 0x20, 0, 0, 4, 0x0f, 2, 0],
                &[70, 0x20, 2, 6, 0, 0, 0, 0x80],
            ],
        ),
        ivhd(0x11, 1, 0x3000, &[&[1, 0, 0, 7]]),
        ivhd(0x11, 0, 0x4000, &[&[1, 0, 0, 8]]),
    ]);
    let table = Ivrs::new(&table).expect("a valid table");
    let unit = |segment, device| {
        let found = table.unit_of(segment, RequesterId::new(device))?;
        let alias = found.alias.get();
        Some((
            found.unit.registers.get(),
            alias,
            found.settings,
            found.extended,
        ))
    };
    let cases = [
        (0, 0x008, Some((0x1000, 0x008, 2, 0))),
        (0, 0x100, Some((0x2000, 0x100, 3, 0))),
        (0, 0x1ff, Some((0x2000, 0x1ff, 3, 0))),
        (0, 0x110, Some((0x2000, 0x111, 4, 0))),
        (0, 0x20f, Some((0x2000, 0x020, 5, 0))),
        (0, 0x220, Some((0x2000, 0x220, 6, 0x8000_0000))),
        // All others: the first unit with an entry for all devices.
        (0, 0x210, Some((0x1000, 0x210, 1, 0))),
        (0, 0x909, Some((0x1000, 0x909, 1, 0))),
        (1, 0x008, Some((0x3000, 0x008, 7, 0))),
        (2, 0x008, None),
    ];
    for (segment, device, expected) in cases {
        assert_eq!(unit(segment, device), expected, "{segment} {device:#x}");
    }
}

#[test]
fn memory_blocks_reserve_regions() {
    use Treatment::{Identity, Untranslated, Unusable};
    let table = ivrs(&[
        ivmd(0x20, 0b0111, 0, 0, 0x1000, 0x1000),
        ivmd(0x21, 0b1000, 0x10, 0, 0x3000, 1),
        ivmd(0x22, 0b0011, 0x10, 0x1f, 0x5000, 0x10),
        ivmd(0x22, 0b0101, 0x11, 0x20, 0x7000, 0x10),
        ivmd(0x22, 0b0000, 0x12, 0x12, 0x9000, 0x10),
        vec![0x23, 0, 4, 0],
    ]);
    let table = Ivrs::new(&table).expect("a valid table");
    assert_eq!(table.blocks().last(), Some(IvrsBlock::Other(0x23)));
    let regions = |device| -> Vec<_> {
        let regions = table.reserved_regions(0, RequesterId::new(device));
        regions
            .map(|region| (region.range.start().get(), region.treatment))
            .collect()
    };
    let all = (0x1000, Identity(Permissions::READ_WRITE));
    let read = (0x5000, Identity(Permissions::READ));
    let write = (0x7000, Identity(Permissions::WRITE));
    assert_eq!(regions(0x0f), [all]);
    assert_eq!(regions(0x10), [all, (0x3000, Untranslated), read]);
    assert_eq!(regions(0x12), [all, read, write, (0x9000, Unusable)]);
    assert_eq!(regions(0x1f), [all, read, write]);
    assert_eq!(regions(0x20), [all, write]);
    assert_eq!(regions(0x21), [all]);
}

#[test]
fn errors() {
    use FirmwareErrorKind::{EndWithoutStart, Range, RangeWithoutEnd, StructureLength, Truncated};
    let unit = |entries: &[u8]| ivhd(0x11, 0, 0, &[entries]);
    let hid = |format: u8, length: u8, uid: &[u8]| {
        let mut entry = vec![240, 0, 0, 0];
        entry.extend([0; 16]);
        entry.extend([format, length]);
        entry.extend(uid);
        unit(&entry)
    };
    let cases = [
        (vec![0x10, 0, 0, 0], 48, StructureLength),
        (vec![0x10, 0, 9, 0], 48, Truncated),
        (ivhd(0x10, 0, 0, &[])[..23].to_vec(), 48, Truncated),
        (
            [&[0x10, 0, 23, 0][..], &[0; 19]].concat(),
            48,
            StructureLength,
        ),
        (
            [&[0x11, 0, 39, 0][..], &[0; 35]].concat(),
            48,
            StructureLength,
        ),
        (
            [&[0x40, 0, 39, 0][..], &[0; 35]].concat(),
            48,
            StructureLength,
        ),
        (
            [&[0x20, 0, 31, 0][..], &[0; 27]].concat(),
            48,
            StructureLength,
        ),
        (ivmd(0x21, 1, 0, 0, 0x1000, 0), 64, Range),
        (ivmd(0x21, 1, 0, 0, u64::MAX, 2), 64, Range),
        (ivmd(0x22, 1, 2, 1, 0x1000, 1), 54, Range),
        // Entries begin at 88: cut off, and ranges of which a part is missing.
        (unit(&[2, 0, 0]), 88, Truncated),
        (unit(&[66, 0, 0, 0]), 88, Truncated),
        (unit(&[128, 0, 0, 0]), 88, Truncated),
        (unit(&[240, 0, 0, 0]), 109, Truncated),
        (unit(&[4, 0, 0, 0]), 88, EndWithoutStart),
        (unit(&[3, 0, 0, 0]), 88, RangeWithoutEnd),
        (unit(&[3, 0, 0, 0, 2, 0, 0, 0]), 88, RangeWithoutEnd),
        (
            unit(&[3, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]),
            88,
            RangeWithoutEnd,
        ),
        (unit(&[3, 1, 0, 0, 4, 0, 0, 0]), 93, Range),
        (hid(0, 1, &[0]), 108, StructureLength),
        (hid(1, 7, &[0; 7]), 108, StructureLength),
        (hid(3, 0, &[]), 108, StructureLength),
        (hid(2, 2, &[0]), 88, Truncated),
    ];
    for (block, offset, kind) in cases {
        let error = Ivrs::new(&ivrs(&[block])).expect_err("a bad table");
        assert_eq!((error.offset, error.kind), (offset, kind));
    }
    let error = Ivrs::new(&acpi(b"IVRS", 0, &[0; 12], &[])).expect_err("a bad table");
    assert_eq!((error.offset, error.kind), (8, FirmwareErrorKind::Revision));
    assert!(
        Ivrs::new(&ivrs(&[]))
            .expect("an empty table")
            .units()
            .next()
            .is_none()
    );
}
