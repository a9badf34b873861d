//! Device entries of an IVHD block (AMD I/O Virtualization specification, section 5.2.2).

use ringfence_types::RequesterId;

use crate::bytes::{Bytes, Records};
use crate::error::{FirmwareError, FirmwareErrorKind};

/// First type of entries with a length field.
const VARIABLE: u8 = 240;

/// Shortest entry with a length field.
const VARIABLE_BYTES: usize = 22;

/// Devices that an entry names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceEntryKind<'a> {
    /// All devices that no other entry names (type 1).
    All,
    /// One device (types 2, 66 and 70).
    Select {
        /// The requester ID of the entry.
        device: RequesterId,
        /// The requester ID that the unit sees on its accesses; another one for aliases.
        alias: RequesterId,
    },
    /// All devices from the first to the last (types 3, 67 and 71, with the end entry, type 4).
    Range {
        /// First requester ID of the range.
        first: RequesterId,
        /// Last device (inclusive).
        last: RequesterId,
        /// The requester ID that the unit sees, if it is the same for all devices.
        alias: Option<RequesterId>,
    },
    /// An I/O APIC or HPET (type 72).
    Special {
        /// ID of the I/O APIC, or number of the HPET.
        handle: u8,
        /// The requester ID of its interrupts.
        alias: RequesterId,
        /// Kind of the device.
        variety: SpecialDevice,
    },
    /// A device of the ACPI namespace (type 240).
    AcpiDevice {
        /// The requester ID that the unit sees.
        device: RequesterId,
        /// ACPI hardware ID (_HID).
        hid: [u8; 8],
        /// ACPI compatible ID (_CID).
        cid: [u8; 8],
        /// ACPI unique ID (_UID).
        uid: AcpiUid<'a>,
    },
    /// A type that the specification reserves.
    Other(u8),
}

/// Kinds of special devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SpecialDevice {
    IoApic,
    Hpet,
    Other(u8),
}

/// Unique ID of an ACPI device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AcpiUid<'a> {
    Absent,
    Integer(u64),
    Text(&'a [u8]),
}

/// Devices with the settings that the unit's device table gets for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceEntry<'a> {
    /// The devices that the entry names.
    pub kind: DeviceEntryKind<'a>,
    /// Settings (DTE setting field): INIT, external interrupt and NMI pass, system management
    /// message enable, LINT0 and LINT1 pass.
    pub settings: u8,
    /// Extended settings of types 70 and 71. Bit 31 disables ATS.
    pub extended: u32,
}

impl DeviceEntry<'_> {
    /// Returns the requester ID that the unit sees on accesses of `requester`. `None` if the entry
    /// does not name the device.
    pub fn alias_of(&self, requester: RequesterId) -> Option<RequesterId> {
        match self.kind {
            DeviceEntryKind::All => Some(requester),
            DeviceEntryKind::Select { device, alias } => (device == requester).then_some(alias),
            DeviceEntryKind::Range { first, last, alias } => {
                (first <= requester && requester <= last).then_some(alias.unwrap_or(requester))
            }
            _ => None,
        }
    }
}

/// Iterates over the entries of a block.
#[derive(Debug, Clone)]
pub(crate) struct Entries<'a> {
    records: Records<'a>,
    failed: bool,
}

impl<'a> Entries<'a> {
    pub(crate) fn new(bytes: Bytes<'a>) -> Self {
        Self {
            records: Records::new(bytes, 4, entry_bytes),
            failed: false,
        }
    }

    /// Returns the next entry; padding is none.
    fn entry(&mut self) -> Option<Result<DeviceEntry<'a>, FirmwareError>> {
        loop {
            let record = match self.records.next()? {
                Ok(record) => record,
                Err(error) => return Some(Err(error)),
            };
            match self.parse(&record).transpose() {
                None => {}
                some => return some,
            }
        }
    }

    fn parse(&mut self, record: &Bytes<'a>) -> Result<Option<DeviceEntry<'a>>, FirmwareError> {
        let device = RequesterId::new(record.u16(1)?);
        let alias = |record: &Bytes<'_>| record.u16(5).map(RequesterId::new);
        let mut extended = 0;
        let kind = match record.u8(0)? {
            0 | 64 => return Ok(None),
            1 => DeviceEntryKind::All,
            2 => DeviceEntryKind::Select {
                device,
                alias: device,
            },
            3 => self.range(record, device, None)?,
            4 => return Err(record.error(0, FirmwareErrorKind::EndWithoutStart)),
            66 => DeviceEntryKind::Select {
                device,
                alias: alias(record)?,
            },
            67 => self.range(record, device, Some(alias(record)?))?,
            70 => {
                extended = record.u32(4)?;
                DeviceEntryKind::Select {
                    device,
                    alias: device,
                }
            }
            71 => {
                extended = record.u32(4)?;
                self.range(record, device, None)?
            }
            72 => DeviceEntryKind::Special {
                handle: record.u8(4)?,
                alias: alias(record)?,
                variety: match record.u8(7)? {
                    1 => SpecialDevice::IoApic,
                    2 => SpecialDevice::Hpet,
                    other => SpecialDevice::Other(other),
                },
            },
            VARIABLE => DeviceEntryKind::AcpiDevice {
                device,
                hid: record.array(4)?,
                cid: record.array(12)?,
                uid: uid(record)?,
            },
            other => DeviceEntryKind::Other(other),
        };
        Ok(Some(DeviceEntry {
            kind,
            settings: record.u8(3)?,
            extended,
        }))
    }

    /// Reads the end entry that follows a start entry.
    fn range(
        &mut self,
        start: &Bytes<'a>,
        first: RequesterId,
        alias: Option<RequesterId>,
    ) -> Result<DeviceEntryKind<'a>, FirmwareError> {
        let without_end = start.error(0, FirmwareErrorKind::RangeWithoutEnd);
        let end = self.records.next().ok_or(without_end)??;
        if end.u8(0)? != 4 {
            return Err(without_end);
        }
        let last = RequesterId::new(end.u16(1)?);
        if last < first {
            return Err(end.error(1, FirmwareErrorKind::Range));
        }
        Ok(DeviceEntryKind::Range { first, last, alias })
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<DeviceEntry<'a>, FirmwareError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let entry = self.entry()?;
        self.failed = entry.is_err();
        Some(entry)
    }
}

/// Returns the length of the first entry: the two high bits of its type, or a field.
fn entry_bytes(rest: &Bytes<'_>) -> Result<usize, FirmwareError> {
    let kind = rest.u8(0)?;
    if kind >= VARIABLE {
        let uid = usize::from(rest.u8(VARIABLE_BYTES.saturating_sub(1))?);
        return Ok(VARIABLE_BYTES.saturating_add(uid));
    }
    Ok(4 << (kind >> 6))
}

fn uid<'a>(record: &Bytes<'a>) -> Result<AcpiUid<'a>, FirmwareError> {
    let uid = record.from(VARIABLE_BYTES)?;
    match (record.u8(20)?, uid.len()) {
        (0, 0) => Ok(AcpiUid::Absent),
        (1, 8) => Ok(AcpiUid::Integer(uid.u64(0)?)),
        (2, _) => Ok(AcpiUid::Text(uid.data())),
        _ => Err(record.error(20, FirmwareErrorKind::StructureLength)),
    }
}
