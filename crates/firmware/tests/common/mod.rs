//! Builders of tables, and a machine with bridges.
#![allow(dead_code)] // each test uses some of them

use ringfence_firmware::{BridgeBuses, PciTopology};
use ringfence_types::RequesterId;

/// Returns the requester ID of a bus, device and function.
pub(crate) fn rid(bus: u8, device: u8, function: u8) -> RequesterId {
    RequesterId::from_parts(bus, device, function).expect("a requester ID")
}

/// Bridges with the buses behind them, in segment 0.
pub(crate) struct Bridges(pub(crate) Vec<(RequesterId, u8, u8)>);

impl PciTopology for Bridges {
    fn buses_behind(&self, segment: u16, bridge: RequesterId) -> Option<BridgeBuses> {
        let found = self.0.iter().find(|(at, _, _)| *at == bridge);
        found
            .filter(|_| segment == 0)
            .map(|(_, secondary, subordinate)| BridgeBuses {
                secondary: *secondary,
                subordinate: *subordinate,
            })
    }
}

/// Builds an ACPI table: header, `body` from offset 36, then the structures.
pub(crate) fn acpi(
    signature: &[u8; 4],
    revision: u8,
    body: &[u8],
    structures: &[Vec<u8>],
) -> Vec<u8> {
    let mut table = signature.to_vec();
    table.extend([0; 4]);
    table.extend([revision, 0]);
    table.extend(b"RINGFETESTBENC");
    table.extend([1, 0, 0, 0]);
    table.extend(b"TEST\x02\0\0\0");
    assert_eq!(table.len(), 36);
    table.extend(body);
    for structure in structures {
        table.extend(structure);
    }
    seal(&mut table);
    table
}

/// Writes length and checksum.
pub(crate) fn seal(table: &mut [u8]) {
    let length = u32::try_from(table.len()).expect("a short table");
    table[4..8].copy_from_slice(&length.to_le_bytes());
    fix_checksum(table);
}

/// Writes the checksum.
pub(crate) fn fix_checksum(table: &mut [u8]) {
    table[9] = 0;
    table[9] = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
}

/// Joins little-endian fields: `le![1_u8, 2_u16]`.
#[macro_export]
macro_rules! le {
    ($($field:expr),* $(,)?) => {{
        let mut bytes: Vec<u8> = Vec::new();
        $(bytes.extend($field.to_le_bytes());)*
        bytes
    }};
}

/// A DMAR table with a host address width of 39 bits.
pub(crate) fn dmar(structures: &[Vec<u8>]) -> Vec<u8> {
    acpi(
        b"DMAR",
        1,
        &[38, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        structures,
    )
}

/// A device scope. The path begins on `bus`.
pub(crate) fn scope(kind: u8, id: u8, bus: u8, path: &[(u8, u8)]) -> Vec<u8> {
    let length = u8::try_from(6 + 2 * path.len()).expect("a short path");
    let mut scope = vec![kind, length, 0, 0, id, bus];
    for (device, function) in path {
        scope.extend([*device, *function]);
    }
    scope
}

/// A structure of DMAR: its type, the fields behind its length, and its scopes.
pub(crate) fn remapping(kind: u16, fields: &[u8], scopes: &[Vec<u8>]) -> Vec<u8> {
    let length = 4 + fields.len() + scopes.iter().map(Vec::len).sum::<usize>();
    let mut structure = le![kind, u16::try_from(length).expect("a short structure")];
    structure.extend(fields);
    structure.extend(scopes.concat());
    structure
}

/// A unit of DMAR.
pub(crate) fn drhd(flags: u8, segment: u16, registers: u64, scopes: &[Vec<u8>]) -> Vec<u8> {
    remapping(0, &le![flags, 0_u8, segment, registers], scopes)
}

/// Reserved memory of DMAR.
pub(crate) fn rmrr(segment: u16, first: u64, last: u64, scopes: &[Vec<u8>]) -> Vec<u8> {
    remapping(1, &le![0_u16, segment, first, last], scopes)
}

/// An IVRS table with widths of 48 and 64 bits.
pub(crate) fn ivrs(blocks: &[Vec<u8>]) -> Vec<u8> {
    let info = 1_u32 | 48 << 8 | 64 << 15 | 1 << 22;
    acpi(b"IVRS", 2, &le![info, 0_u64], blocks)
}

/// A unit of IVRS.
pub(crate) fn ivhd(kind: u8, segment: u16, registers: u64, entries: &[&[u8]]) -> Vec<u8> {
    let entries = entries.concat();
    let header = if kind == 0x10 { 24 } else { 40 };
    let length = u16::try_from(header + entries.len()).expect("a short block");
    let mut block = le![kind, 0xb0_u8, length, 0x0002_u16, 0x40_u16, registers];
    block.extend(le![segment, 0x0100_u16, 0x8000_0000_u32]);
    if kind != 0x10 {
        block.extend(le![0x246_577e_fa22_54fa_u64, 0x10_u64]);
    }
    block.extend(entries);
    block
}

/// Reserved memory of IVRS.
pub(crate) fn ivmd(kind: u8, flags: u8, first: u16, last: u16, start: u64, bytes: u64) -> Vec<u8> {
    le![kind, flags, 32_u16, first, last, 0_u64, start, bytes]
}

/// A table of nodes: IORT or RIMT.
pub(crate) fn nodes(signature: &[u8; 4], revision: u8, nodes: &[Vec<u8>]) -> Vec<u8> {
    let count = u32::try_from(nodes.len()).expect("few nodes");
    acpi(signature, revision, &le![count, 48_u32, 0_u32], nodes)
}

/// An ID mapping of IORT or RIMT.
pub(crate) fn mapping(first: u32, count: u32, output: u32, reference: u32, flags: u32) -> Vec<u8> {
    le![first, count, output, reference, flags]
}

/// A node of IORT: its fields behind the common ones, and its mappings.
pub(crate) fn iort_node(kind: u8, revision: u8, fields: &[u8], mappings: &[Vec<u8>]) -> Vec<u8> {
    let at = 16 + fields.len();
    let length = u16::try_from(at + 20 * mappings.len()).expect("a short node");
    let at = u32::try_from(at).expect("a short node");
    let count = u32::try_from(mappings.len()).expect("few mappings");
    let mut node = le![kind, length, revision, 7_u32, count, at];
    node.extend(fields);
    node.extend(mappings.concat());
    node
}

/// A root complex of IORT.
pub(crate) fn root_complex(segment: u32, mappings: &[Vec<u8>]) -> Vec<u8> {
    iort_node(
        2,
        3,
        &le![0_u64, 1_u32, segment, 48_u8, 0_u8, 0_u16],
        mappings,
    )
}

/// An SMMUv3 of IORT.
pub(crate) fn smmu_v3(registers: u64, flags: u32, mappings: &[Vec<u8>]) -> Vec<u8> {
    let mut fields = le![registers, flags, 0_u32, 0_u64, 0_u32];
    fields.extend(le![10_u32, 11_u32, 12_u32, 13_u32, 5_u32, 0_u32]);
    iort_node(4, 4, &fields, mappings)
}

/// A VIOT table.
pub(crate) fn viot(nodes: &[Vec<u8>]) -> Vec<u8> {
    let count = u16::try_from(nodes.len()).expect("few nodes");
    acpi(b"VIOT", 0, &le![count, 48_u16, 0_u64], nodes)
}

/// A range of PCI devices of VIOT.
pub(crate) fn pci_range(
    endpoint: u32,
    segments: [u16; 2],
    devices: [u16; 2],
    output: u16,
) -> Vec<u8> {
    let mut node = le![1_u8, 0_u8, 24_u16, endpoint, segments[0], segments[1]];
    node.extend(le![devices[0], devices[1], output, 0_u32, 0_u16]);
    node
}

/// Reads a fixture of `tests/data`: hexadecimal digits, and comments behind `#`.
pub(crate) fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/data/{name}.hex", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("the fixture can be read");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let digits: Vec<char> = lines
        .flat_map(str::chars)
        .filter(|c| !c.is_whitespace())
        .collect();
    let byte = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16);
    digits
        .chunks(2)
        .map(|pair| byte(pair).expect("a byte"))
        .collect()
}

/// A node of a device tree.
pub(crate) struct TreeNode {
    pub(crate) name: &'static str,
    pub(crate) properties: Vec<(&'static str, Vec<u8>)>,
    pub(crate) children: Vec<TreeNode>,
}

/// Joins big-endian cells.
pub(crate) fn cells(cells: &[u32]) -> Vec<u8> {
    cells.iter().flat_map(|cell| cell.to_be_bytes()).collect()
}

/// Builds a flattened device tree. The strings block has each name as often as it is used.
pub(crate) fn tree(root: &TreeNode) -> Vec<u8> {
    let (mut structure, mut strings) = (Vec::new(), Vec::new());
    write_node(root, &mut structure, &mut strings);
    structure.extend(cells(&[9]));
    blob(&structure, &strings)
}

/// Joins the blocks of a device tree behind a header of version 17.
pub(crate) fn blob(structure: &[u8], strings: &[u8]) -> Vec<u8> {
    let [structure_bytes, strings_bytes] =
        [structure, strings].map(|block| u32::try_from(block.len()).expect("a short block"));
    let total = 56 + structure_bytes + strings_bytes;
    let strings_at = 56 + structure_bytes;
    let mut blob = cells(&[0xd00d_feed, total, 56, strings_at, 40, 17, 16, 0]);
    blob.extend(cells(&[strings_bytes, structure_bytes, 0, 0, 0, 0]));
    blob.extend(structure);
    blob.extend(strings);
    blob
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

fn write_node(node: &TreeNode, structure: &mut Vec<u8>, strings: &mut Vec<u8>) {
    structure.extend(cells(&[1]));
    structure.extend(node.name.as_bytes());
    structure.push(0);
    pad(structure);
    for (name, value) in &node.properties {
        let length = u32::try_from(value.len()).expect("a short value");
        let at = u32::try_from(strings.len()).expect("few names");
        structure.extend(cells(&[3, length, at]));
        structure.extend(value);
        pad(structure);
        strings.extend(name.as_bytes());
        strings.push(0);
    }
    for child in &node.children {
        write_node(child, structure, strings);
    }
    structure.extend(cells(&[2]));
}
