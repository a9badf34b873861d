//! The parsers of firmware tables, and the lookups in tables that they accept.
//!
//! | bytes | meaning |
//! |---|---|
//! | 0 | bits 0..=2 parser; bit 7: write a right checksum first |
//! | 1..=2 | requester ID of the lookups, little-endian |
//! | 3.. | the table |

use ringfence_firmware::{
    BridgeBuses, DeviceScope, DeviceTree, Dmar, FirmwareError, FirmwareErrorKind, Iort, Ivrs,
    PciTopology, ReservedRegion, Rimt, Viot, merge_reserved,
};
use ringfence_types::{IovaRange, PfnRange, RequesterId};

use crate::OutcomeHook;

/// Outcomes that the corpus reaches: every table, every error, and the results of lookups.
pub const OUTCOMES: &[&str] = &[
    "dmar: no unit",
    "dmar: named unit",
    "dmar: unit of all others",
    "ivrs: no unit",
    "ivrs: unit",
    "ivrs: alias",
    "iort: no unit",
    "iort: unit",
    "rimt: no unit",
    "rimt: unit",
    "viot: no unit",
    "viot: unit",
    "tree: no unit",
    "tree: unit",
    "reserved regions",
    "too many reserved regions",
    "Truncated",
    "Signature",
    "TableLength",
    "Checksum",
    "Revision",
    "StructureLength",
    "DevicePath",
    "Range",
    "RangeWithoutEnd",
    "EndWithoutStart",
    "Reference",
    "TooManyHops",
    "Unterminated",
    "Token",
    "TooDeep",
    "Property",
    "TooManyEntries",
    "Registers",
];

/// Room for the merged regions of a device.
const RANGES: usize = 4;

/// Every device with function 0 is a bridge. Each bridge has the next bus behind it, up to bus 3.
struct Bridges;

impl PciTopology for Bridges {
    fn buses_behind(&self, _segment: u16, bridge: RequesterId) -> Option<BridgeBuses> {
        let secondary = bridge.bus().checked_add(1)?;
        (bridge.get() & 7 == 0 && secondary < 4).then_some(BridgeBuses {
            secondary,
            subordinate: 3,
        })
    }
}

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some(([header, low, high], table)) = data.split_first_chunk::<3>() else {
        return;
    };
    let device = RequesterId::new(u16::from_le_bytes([*low, *high]));
    let mut table = table.to_vec();
    if header & 0x80 != 0
        && let Some(checksum) = table.get_mut(9)
    {
        *checksum = 0;
        let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
        table[9] = sum;
    }
    let result = match header & 7 {
        0 => dmar(&table, device, reached),
        1 => ivrs(&table, device, reached),
        2 => iort(&table, device, reached),
        3 => rimt(&table, device, reached),
        4 => viot(&table, device, reached),
        _ => tree(&table, device, reached),
    };
    if let Err(error) = result {
        reached(name(error.kind));
    }
}

fn name(kind: FirmwareErrorKind) -> &'static str {
    match kind {
        FirmwareErrorKind::Truncated => "Truncated",
        FirmwareErrorKind::Signature => "Signature",
        FirmwareErrorKind::TableLength => "TableLength",
        FirmwareErrorKind::Checksum => "Checksum",
        FirmwareErrorKind::Revision => "Revision",
        FirmwareErrorKind::StructureLength => "StructureLength",
        FirmwareErrorKind::DevicePath => "DevicePath",
        FirmwareErrorKind::Range => "Range",
        FirmwareErrorKind::RangeWithoutEnd => "RangeWithoutEnd",
        FirmwareErrorKind::EndWithoutStart => "EndWithoutStart",
        FirmwareErrorKind::Reference => "Reference",
        FirmwareErrorKind::TooManyHops => "TooManyHops",
        FirmwareErrorKind::Unterminated => "Unterminated",
        FirmwareErrorKind::Token => "Token",
        FirmwareErrorKind::TooDeep => "TooDeep",
        FirmwareErrorKind::Property => "Property",
        FirmwareErrorKind::TooManyEntries => "TooManyEntries",
        FirmwareErrorKind::Registers => "Registers",
        _ => "a kind of error without a name here",
    }
}

/// An accepted ACPI table sums up to 0 and begins with its signature and length.
fn check_header(table: &[u8], signature: &[u8]) {
    assert_eq!(&table[..4], signature);
    let length = u32::from_le_bytes(table[4..8].try_into().expect("4 bytes"));
    let table = &table[..usize::try_from(length).expect("a short table")];
    let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    assert_eq!(sum, 0);
}

/// The merged ranges are sorted and apart, and contain exactly the pages of the regions' ends.
fn check_reserved(
    regions: impl Iterator<Item = ReservedRegion> + Clone,
    longest: usize,
    reached: OutcomeHook<'_>,
) {
    assert!(regions.clone().count() <= longest);
    let mut buffer = [PfnRange::covering(&IovaRange::ALL); RANGES];
    let Ok(merged) = merge_reserved(regions.clone(), &mut buffer) else {
        assert!(regions.count() > RANGES);
        return reached("too many reserved regions");
    };
    for pair in merged.windows(2) {
        assert!(pair[0].hi().get() + 1 < pair[1].lo().get());
    }
    let pages = || {
        regions
            .clone()
            .map(|region| PfnRange::covering(&region.range))
    };
    for region in pages() {
        assert!(merged.iter().any(|range| range.contains(&region)));
    }
    for range in merged.iter() {
        assert!(pages().any(|region| region.lo() == range.lo()));
        assert!(pages().any(|region| region.hi() == range.hi()));
        reached("reserved regions");
    }
}

fn dmar(data: &[u8], device: RequesterId, reached: OutcomeHook<'_>) -> Result<(), FirmwareError> {
    let table = Dmar::new(data)?;
    check_header(data, b"DMAR");
    assert!(table.structures().count() <= data.len() / 4);
    for segment in 0..2 {
        // The rule of section 8.3, once more and directly.
        let units: Vec<_> = table
            .units()
            .filter(|unit| unit.segment == segment)
            .collect();
        let names = |scope: DeviceScope<'_>| scope.covers(segment, device, &Bridges);
        let named = units.iter().find(|unit| unit.devices.iter().any(names));
        let all = units.iter().find(|unit| unit.include_pci_all);
        let found = table.unit_of(segment, device, &Bridges);
        assert_eq!(found.as_ref(), named.or(all));
        reached(match (named, all) {
            (Some(_), _) => "dmar: named unit",
            (None, Some(_)) => "dmar: unit of all others",
            (None, None) => "dmar: no unit",
        });
    }
    let regions: Vec<_> = table.reserved_regions(0, device, Bridges).collect();
    check_reserved(regions.into_iter(), data.len() / 24, reached);
    Ok(())
}

fn ivrs(data: &[u8], device: RequesterId, reached: OutcomeHook<'_>) -> Result<(), FirmwareError> {
    let table = Ivrs::new(data)?;
    check_header(data, b"IVRS");
    let entries: usize = table.units().map(|unit| unit.devices().count()).sum();
    assert!(entries <= data.len() / 4);
    match table.unit_of(0, device) {
        Some(found) => {
            assert!(table.units().any(|unit| unit == found.unit));
            let aliases = || found.unit.devices().map(|entry| entry.alias_of(device));
            assert!(aliases().any(|alias| alias == Some(found.alias)));
            let aliased = found.alias != device;
            reached(if aliased { "ivrs: alias" } else { "ivrs: unit" });
        }
        None => {
            let mut entries = table.units().flat_map(|unit| {
                let ours = unit.segment == 0;
                unit.devices().filter(move |_| ours)
            });
            assert!(entries.all(|entry| entry.alias_of(device).is_none()));
            reached("ivrs: no unit");
        }
    }
    let regions: Vec<_> = table.reserved_regions(0, device).collect();
    check_reserved(regions.into_iter(), data.len() / 32, reached);
    Ok(())
}

fn iort(data: &[u8], device: RequesterId, reached: OutcomeHook<'_>) -> Result<(), FirmwareError> {
    let table = Iort::new(data)?;
    check_header(data, b"IORT");
    assert!(table.nodes().count() <= data.len() / 16);
    table.its_of(0, device)?;
    let Some(stream) = table.unit_of(0, device)? else {
        reached("iort: no unit");
        return Ok(());
    };
    assert!(table.units().any(|unit| unit == stream.unit));
    reached("iort: unit");
    let regions: Vec<_> = table.reserved_regions(&stream).collect();
    check_reserved(regions.into_iter(), data.len() / 20, reached);
    Ok(())
}

fn rimt(data: &[u8], device: RequesterId, reached: OutcomeHook<'_>) -> Result<(), FirmwareError> {
    let table = Rimt::new(data)?;
    check_header(data, b"RIMT");
    assert!(table.nodes().count() <= data.len() / 8);
    let found = table.unit_of(0, device)?;
    if let Some(found) = found {
        assert!(table.units().any(|unit| unit == found.unit));
        assert!(found.unit.wires().count() <= data.len() / 8);
    }
    reached(if found.is_some() {
        "rimt: unit"
    } else {
        "rimt: no unit"
    });
    Ok(())
}

fn viot(data: &[u8], device: RequesterId, reached: OutcomeHook<'_>) -> Result<(), FirmwareError> {
    let table = Viot::new(data)?;
    check_header(data, b"VIOT");
    assert!(table.nodes().count() <= data.len() / 4);
    let found = table.unit_of(0, device)?;
    if let Some(found) = found {
        assert!(table.units().any(|unit| unit == found.unit));
    }
    reached(if found.is_some() {
        "viot: unit"
    } else {
        "viot: no unit"
    });
    Ok(())
}

fn tree(data: &[u8], device: RequesterId, reached: OutcomeHook<'_>) -> Result<(), FirmwareError> {
    let tree = DeviceTree::new(data)?;
    assert!(tree.units().count() <= data.len() / 8);
    for device in tree.devices() {
        for found in tree.units_of_device(&device) {
            let unit = found?.unit;
            assert!(tree.units().any(|other| other == unit));
        }
    }
    let found = tree.unit_of(0, device)?;
    if let Some(found) = found {
        assert!(tree.units().any(|unit| unit == found.unit));
    }
    reached(if found.is_some() {
        "tree: unit"
    } else {
        "tree: no unit"
    });
    Ok(())
}
