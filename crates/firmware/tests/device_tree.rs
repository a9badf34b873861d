//! Device trees: units, devices, addresses through `ranges`, and all errors.

mod common;

use common::{TreeNode, blob, cells, rid, tree};
use ringfence_firmware::{DeviceTree, FirmwareErrorKind, MAX_DEPTH, UnitKind, UnitLocation};
use ringfence_types::{PhysAddr, PhysRange, RequesterId};

type Properties = Vec<(&'static str, Vec<u8>)>;

fn node(name: &'static str, properties: Properties, children: Vec<TreeNode>) -> TreeNode {
    TreeNode {
        name,
        properties,
        children,
    }
}

fn text(text: &str) -> Vec<u8> {
    [text.as_bytes(), &[0]].concat()
}

/// A root with two cells of address and size, and a bus with one cell of each behind it: bus
/// address 0x1000 is physical address 0x1_0000_0000.
fn machine() -> TreeNode {
    let unit = |compatible, phandle| {
        vec![
            ("compatible", text(compatible)),
            ("phandle", cells(&[phandle])),
            ("#iommu-cells", cells(&[1])),
        ]
    };
    let mut riscv = unit("vendor,unit\0riscv,iommu", 1);
    riscv.push(("reg", cells(&[0x3000, 0x1000])));
    let mut smmu = unit("arm,smmu-v3", 2);
    smmu.push(("reg", cells(&[1, 0x9000, 0, 0x2_0000])));
    let mut disabled = unit("arm,smmu-v3", 3);
    disabled.push(("reg", cells(&[2, 0, 0, 0x2_0000])));
    disabled.push(("status", text("disabled")));
    let mut pci_unit = unit("pci1af4,1057", 4);
    pci_unit.push(("reg", cells(&[0x0001_2000, 0, 0, 0, 0])));
    let bus = vec![
        ("#address-cells", cells(&[1])),
        ("#size-cells", cells(&[1])),
        ("ranges", cells(&[0, 9, 0, 0x1000, 0x1000, 1, 0, 0x4000])),
    ];
    let host = |domain, map: &[u32]| {
        let properties = vec![
            ("device_type", text("pci")),
            ("#address-cells", cells(&[3])),
            ("#size-cells", cells(&[2])),
            ("linux,pci-domain", cells(&[domain])),
            ("iommu-map", cells(map)),
        ];
        node("pci", properties, vec![])
    };
    let mut first = host(0, &[0, 4, 0, 0x112, 0x120, 4, 0x120, 0xfee0]);
    first.children.push(node("iommu@2", pci_unit, vec![]));
    let mut second = host(1, &[8, 2, 0x800, 8, 0x10, 9, 0, 1]);
    second.properties.push(("iommu-map-mask", cells(&[0xff])));
    let disk = vec![
        ("iommus", cells(&[1, 0x77, 2, 0x88])),
        ("phandle", cells(&[30])),
    ];
    node(
        "",
        vec![
            ("#address-cells", cells(&[2])),
            ("#size-cells", cells(&[2])),
        ],
        vec![
            node("bus", bus, vec![node("iommu@3000", riscv, vec![])]),
            node("smmu@1", smmu, vec![]),
            node("smmu@2", disabled, vec![]),
            first,
            second,
            node("disk", disk, vec![]),
        ],
    )
}

fn range(start: u64, bytes: u64) -> UnitLocation {
    UnitLocation::Mmio(PhysRange::new(PhysAddr::new(start), bytes).expect("a range"))
}

#[test]
fn units_and_their_places() {
    let blob = tree(&machine());
    let tree = DeviceTree::new(&blob).expect("a valid tree");
    let units: Vec<_> = tree.units().collect();
    let facts: Vec<_> = units
        .iter()
        .map(|unit| (unit.name, unit.kind, unit.location))
        .collect();
    let pci = UnitLocation::Pci(rid(1, 4, 0));
    let expected: [(&[u8], _, _); 3] = [
        (b"iommu@3000", UnitKind::RiscV, range(0x1_0000_2000, 0x1000)),
        (b"smmu@1", UnitKind::SmmuV3, range(0x1_0000_9000, 0x2_0000)),
        (b"iommu@2", UnitKind::VirtioPci, pci),
    ];
    assert_eq!(facts, expected);
    let phandles: Vec<_> = units
        .iter()
        .map(|unit| (unit.phandle, unit.id_cells))
        .collect();
    assert_eq!(phandles, [(Some(1), 1), (Some(2), 1), (Some(4), 1)]);
}

#[test]
fn lookups() {
    let blob = tree(&machine());
    let tree = DeviceTree::new(&blob).expect("a valid tree");
    let lookup = |segment, device| {
        let found = tree
            .unit_of(segment, RequesterId::new(device))
            .expect("sound references");
        found.map(|found| (found.unit.phandle, found.id))
    };
    let cases = [
        (0, 0, Some((Some(4), 0))),
        (0, 0x111, Some((Some(4), 0x111))),
        (0, 0x112, None),
        (0, 0x120, Some((Some(4), 0x120))),
        (0, 0xffff, Some((Some(4), 0xffff))),
        // The mask keeps device and function.
        (1, 0x0308, Some((Some(2), 0x800))),
        (1, 0x030f, Some((Some(2), 0x807))),
        (1, 0x0307, None),
        (2, 0, None),
    ];
    for (segment, device, expected) in cases {
        assert_eq!(lookup(segment, device), expected, "{segment} {device:#x}");
    }
    let error = tree.unit_of(1, rid(0, 2, 0)).expect_err("no unit 9");
    assert_eq!(error.kind, FirmwareErrorKind::Reference);
    let disk = tree.devices().next().expect("a device");
    assert_eq!((disk.name, disk.phandle), (&b"disk"[..], Some(30)));
    let units: Vec<_> = tree
        .units_of_device(&disk)
        .map(|found| found.map(|found| (found.unit.phandle, found.id)))
        .collect();
    assert_eq!(units, [Ok((Some(1), 0x77)), Ok((Some(2), 0x88))]);
}

/// Returns the units of a device with `iommus`, and the first error.
fn iommus(list: &[u32], id_cells: u32) -> (usize, Option<FirmwareErrorKind>) {
    let unit = vec![
        ("compatible", text("riscv,pci-iommu")),
        ("phandle", cells(&[1])),
        ("#iommu-cells", cells(&[id_cells])),
        ("reg", cells(&[0])),
    ];
    let device = vec![("iommus", cells(list))];
    let root = node(
        "",
        vec![],
        vec![node("u", unit, vec![]), node("d", device, vec![])],
    );
    let blob = tree(&root);
    let tree = DeviceTree::new(&blob).expect("a valid tree");
    let device = tree.devices().next().expect("a device");
    let found: Vec<_> = tree.units_of_device(&device).collect();
    let error = found.iter().find_map(|found| found.err());
    (
        found.iter().flatten().count(),
        error.map(|error| error.kind),
    )
}

#[test]
fn errors_of_iommus() {
    use FirmwareErrorKind::{Property, Reference, TooManyEntries, Truncated};
    assert_eq!(iommus(&[1, 5], 1), (1, None));
    assert_eq!(iommus(&[1, 1], 0), (2, None));
    assert_eq!(iommus(&[1, 5, 2, 6], 1), (1, Some(Reference)));
    assert_eq!(iommus(&[1], 1), (0, Some(Truncated)));
    assert_eq!(iommus(&[1, 5, 6], 2), (0, Some(Property)));
    assert_eq!(iommus(&[1; 16], 0), (16, None));
    assert_eq!(iommus(&[1; 17], 0), (16, Some(TooManyEntries)));
}

fn error(blob: &[u8]) -> (usize, FirmwareErrorKind) {
    let error = DeviceTree::new(blob).expect_err("a bad tree");
    (error.offset, error.kind)
}

#[test]
fn errors_of_the_header() {
    use FirmwareErrorKind::{Revision, Signature, TableLength, Truncated};
    let sound = tree(&node("", vec![("status", text("okay"))], vec![]));
    assert!(DeviceTree::new(&[sound.as_slice(), &[1, 2]].concat()).is_ok());
    for end in 0..sound.len() {
        let expected = if end < 40 {
            (0, Truncated)
        } else {
            (4, Truncated)
        };
        assert_eq!(error(&sound[..end]), expected, "{end}");
    }
    let cases = [
        (0, 0xd00d_feee, 0, Signature),
        (4, 39, 4, TableLength),
        (8, u32::MAX, 0xffff_ffff, Truncated),
        (12, u32::MAX, 0xffff_ffff, Truncated),
        (20, 16, 20, Revision),
        (24, 18, 20, Revision),
        (32, u32::MAX, 92, Truncated),
        (36, u32::MAX, 56, Truncated),
    ];
    for (at, value, offset, kind) in cases {
        let mut blob = sound.clone();
        blob[at..at + 4].copy_from_slice(&u32::to_be_bytes(value));
        assert_eq!(error(&blob), (offset, kind), "{at}");
    }
}

#[test]
fn errors_of_the_structure() {
    use FirmwareErrorKind::{Token, TooDeep, Truncated, Unterminated};
    let begin = [1_u32, 0];
    let cases: [(Vec<u32>, usize, FirmwareErrorKind); 11] = [
        (vec![], 56, Truncated),
        (vec![9], 56, Token),
        (vec![2], 56, Token),
        (vec![3, 0, 0], 56, Token),
        (vec![1, 0, 7], 64, Token),
        (vec![1, 0, 2, 1, 0], 68, Token),
        (vec![1, 0, 9], 64, Token),
        // A property behind a child.
        (vec![1, 0, 1, 0, 2, 3, 0, 0], 76, Token),
        (vec![1, 0, 3, 0xffff_ffff, 0], 76, Truncated),
        (vec![1, 0x4141_4141], 60, Unterminated),
        // The name of a property is past the strings, which begin at 96.
        (vec![1, 0, 3, 0, 99, 4, 4, 4, 4, 4], 96 + 99, Truncated),
    ];
    for (structure, offset, kind) in cases {
        assert_eq!(
            error(&blob(&cells(&structure), b"a\0")),
            (offset, kind),
            "{structure:?}"
        );
    }
    // NOP tokens are allowed everywhere; 32 levels are, and one more is not.
    assert!(DeviceTree::new(&blob(&cells(&[4, 1, 0, 4, 4, 2, 4, 9]), b"")).is_ok());
    let nested = |depth: usize| {
        let mut structure = begin.repeat(depth);
        structure.extend(vec![2; depth]);
        structure.push(9);
        blob(&cells(&structure), b"")
    };
    assert!(DeviceTree::new(&nested(MAX_DEPTH)).is_ok());
    assert_eq!(error(&nested(MAX_DEPTH + 1)), (56 + 8 * MAX_DEPTH, TooDeep));
    // Names of properties have at most 255 characters.
    let property = cells(&[1, 0, 3, 0, 0, 2, 9]);
    let name = |length| [vec![b'a'; length], vec![0]].concat();
    assert!(DeviceTree::new(&blob(&property, &name(255))).is_ok());
    assert_eq!(error(&blob(&property, &name(256))), (84, Unterminated));
}

#[test]
fn errors_of_properties() {
    use FirmwareErrorKind::{Property, Range, Registers, TooManyEntries};
    let kind = |properties: Properties| error(&tree(&node("", properties, vec![]))).1;
    for name in [
        "phandle",
        "#address-cells",
        "#size-cells",
        "#iommu-cells",
        "linux,pci-domain",
    ] {
        assert_eq!(kind(vec![(name, vec![0; 3])]), Property, "{name}");
    }
    assert_eq!(kind(vec![("iommus", vec![0; 6])]), Property);
    assert_eq!(kind(vec![("iommu-map", vec![0; 15])]), Property);
    assert_eq!(kind(vec![("iommu-map-mask", vec![0; 8])]), Property);
    let map = |map: [u32; 4]| vec![("iommu-map", cells(&map))];
    assert_eq!(kind(map([u32::MAX, 1, 0, 2])), Range);
    assert_eq!(kind(map([0, 1, u32::MAX, 2])), Range);
    // A unit on a bus with ranges.
    let unit = |reg: &[u32], bus: Properties| {
        let unit = vec![("compatible", text("riscv,iommu")), ("reg", cells(reg))];
        let bus = node("bus", bus, vec![node("u", unit, vec![])]);
        tree(&node("", vec![], vec![bus]))
    };
    let ranges = |ranges: &[u32]| vec![("ranges", cells(ranges))];
    assert!(DeviceTree::new(&unit(&[0, 0x100, 0x10], ranges(&[]))).is_ok());
    assert!(DeviceTree::new(&unit(&[0, 0x100, 0x10], ranges(&[0, 0, 0, 0, 0x110]))).is_ok());
    let cases: [(&[u32], Properties); 8] = [
        // No ranges, too few cells, no bytes, past the range, past the address space.
        (&[0, 0x100, 0x10], vec![]),
        (&[0, 0x100], ranges(&[])),
        (&[], ranges(&[])),
        (&[0, 0x100, 0], ranges(&[])),
        (&[0, 0x100, 0x10], ranges(&[0, 0, 0, 0, 0x10f])),
        (&[u32::MAX, u32::MAX, 2], ranges(&[])),
        (
            &[0, 0x100, 0x10],
            ranges(&[0, 0x100, u32::MAX, u32::MAX, 0x10]),
        ),
        (
            &[0, 0, 1, 1],
            [ranges(&[]), vec![("#address-cells", cells(&[3]))]].concat(),
        ),
    ];
    for (reg, bus) in cases {
        assert_eq!(error(&unit(reg, bus)).1, Registers, "{reg:x?}");
    }
    let many = |count| ranges(&[0, 0, 0, 0, 0x10].repeat(count));
    let longer = |last: &[u32]| ranges(&[&[0, 0, 0, 0, 0x10].repeat(63), last].concat());
    let own = [0, 0x100, 0, 0x100, 0x10];
    assert!(DeviceTree::new(&unit(&[0, 0x100, 0x10], longer(&own))).is_ok());
    assert_eq!(error(&unit(&[0, 0x100, 0x10], many(64))).1, Registers);
    assert_eq!(error(&unit(&[0, 0x100, 0x10], many(65))).1, TooManyEntries);
    let pci = vec![("compatible", text("riscv,pci-iommu"))];
    assert_eq!(error(&tree(&node("", pci, vec![]))), (56, Registers));
}
