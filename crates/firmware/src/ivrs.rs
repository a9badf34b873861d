//! IVRS: the units of AMD-Vi (AMD I/O Virtualization specification, section 5.2).

use ringfence_types::{Permissions, PhysAddr, RequesterId};

use crate::acpi::{self, AcpiHeader};
use crate::bytes::{Bytes, Records};
use crate::error::{FirmwareError, FirmwareErrorKind};
use crate::ivhd::{DeviceEntry, DeviceEntryKind, Entries};
use crate::reserved::{self, ReservedRegion, Treatment};

/// Length of the table before the blocks.
const TABLE_BYTES: usize = 48;

/// The I/O virtualization reporting structure. All of its blocks have been checked.
#[derive(Debug, Clone, Copy)]
pub struct Ivrs<'a> {
    /// Fields of the ACPI header.
    pub header: AcpiHeader,
    /// Information on all units.
    pub info: IvInfo,
    blocks: Bytes<'a>,
    /// The highest type of an IVHD block.
    highest: u8,
}

/// The field `IVinfo` (section 5.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IvInfo(u32);

impl IvInfo {
    /// Returns true if blocks of type 11h and 40h have images of the extended feature registers.
    pub const fn efr_images(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns true if firmware asks to keep DMA confined until the operating system takes over
    /// (DMA remap support).
    pub const fn dma_control(self) -> bool {
        self.0 & 2 != 0
    }

    /// Returns the width of a physical address in bits (`PASize`).
    pub const fn physical_width(self) -> u8 {
        (self.0 >> 8) as u8 & 0x7f
    }

    /// Returns the width of a virtual address in bits (`VASize`).
    pub const fn virtual_width(self) -> u8 {
        (self.0 >> 15) as u8 & 0x7f
    }

    /// Returns true if ATS translates no address of the HyperTransport region (`HtAtsResv`).
    pub const fn hypertransport_reserved(self) -> bool {
        self.0 & 1 << 22 != 0
    }
}

/// A block of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IvrsBlock<'a> {
    /// A unit and its devices.
    Hardware(Ivhd<'a>),
    /// Reserved memory of devices.
    Memory(Ivmd),
    /// A type that the specification reserves; software ignores it.
    Other(u8),
}

/// A unit: "I/O virtualization hardware definition" (section 5.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ivhd<'a> {
    /// Type of the block: 10h, 11h or 40h.
    pub kind: u8,
    /// Feature flags, such as HtTunEn, PassPW, Isoc and IotlbSup.
    pub flags: u8,
    /// PCI device of the unit.
    pub device: RequesterId,
    /// Offset of its capability in configuration space.
    pub capability: u16,
    /// Address of the registers.
    pub registers: PhysAddr,
    /// PCI segment of the unit and its devices.
    pub segment: u16,
    /// Interrupt number (bits 4:0) and unit ID (bits 12:8).
    pub info: u16,
    /// Feature reporting field of type 10h, attributes of the others.
    pub features: u32,
    /// Images of the extended feature registers (MMIO offsets 30h and 1A0h); `None` for type 10h.
    pub efr: Option<[u64; 2]>,
    entries: Bytes<'a>,
}

impl<'a> Ivhd<'a> {
    fn parse(bytes: &Bytes<'a>, kind: u8) -> Result<Self, FirmwareError> {
        let header = if kind == 0x10 { 24 } else { 40 };
        bytes.at_least(header)?;
        let efr = match kind {
            0x10 => None,
            _ => Some([bytes.u64(24)?, bytes.u64(32)?]),
        };
        let entries = bytes.from(header)?;
        Entries::new(entries).try_for_each(|entry| entry.map(|_| ()))?;
        Ok(Self {
            kind,
            flags: bytes.u8(1)?,
            device: RequesterId::new(bytes.u16(4)?),
            capability: bytes.u16(6)?,
            registers: PhysAddr::new(bytes.u64(8)?),
            segment: bytes.u16(16)?,
            info: bytes.u16(18)?,
            features: bytes.u32(20)?,
            efr,
            entries,
        })
    }

    /// Returns the device entries, in the order of the table.
    pub fn devices(&self) -> impl Iterator<Item = DeviceEntry<'a>> + use<'a> {
        Entries::new(self.entries).flatten()
    }
}

/// "I/O virtualization memory definition" (section 5.2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ivmd {
    /// PCI segment of the devices.
    pub segment: u16,
    /// First and last device; `None` for all devices.
    pub devices: Option<[RequesterId; 2]>,
    /// The region, with the permissions of its unity map or as an exclusion range.
    pub region: ReservedRegion,
}

impl Ivmd {
    fn parse(bytes: &Bytes<'_>, kind: u8) -> Result<Self, FirmwareError> {
        bytes.at_least(32)?;
        let first = RequesterId::new(bytes.u16(4)?);
        let last = RequesterId::new(bytes.u16(6)?);
        let devices = match kind {
            0x20 => None,
            0x21 => Some([first, first]),
            _ if last < first => return Err(bytes.error(6, FirmwareErrorKind::Range)),
            _ => Some([first, last]),
        };
        let start = bytes.u64(16)?;
        let offset = bytes.offset().saturating_add(16);
        Ok(Self {
            segment: bytes.u16(8)?,
            devices,
            region: ReservedRegion {
                range: reserved::range_of(start, bytes.u64(24)?, offset)?,
                treatment: Self::treatment(bytes.u8(1)?),
            },
        })
    }

    /// Reads the flags: unity (bit 0), read (1), write (2), exclusion range (3). Exclusion ranges
    /// are used only by units that have them, and then they take precedence.
    fn treatment(flags: u8) -> Treatment {
        if flags & 8 != 0 {
            return Treatment::Untranslated;
        }
        match Permissions::from_bits(u64::from(flags >> 1)) {
            Some(permissions) if flags & 1 != 0 => Treatment::Identity(permissions),
            _ => Treatment::Unusable,
        }
    }

    fn names(&self, segment: u16, requester: RequesterId) -> bool {
        let [first, last] = match self.devices {
            Some(devices) => devices,
            None => return true,
        };
        self.segment == segment && first <= requester && requester <= last
    }
}

/// A device with the unit that translates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IvrsDevice<'a> {
    /// The unit that translates the device.
    pub unit: Ivhd<'a>,
    /// The requester ID that the unit sees on accesses of the device.
    pub alias: RequesterId,
    /// Settings for the device table.
    pub settings: u8,
    /// Extended settings for the device table.
    pub extended: u32,
}

impl<'a> Ivrs<'a> {
    /// Checks a table. Bytes after its end are ignored.
    ///
    /// # Errors
    /// The first error of the table.
    pub fn new(table: &'a [u8]) -> Result<Self, FirmwareError> {
        let (header, bytes) = acpi::check(table, b"IVRS", 1)?;
        let mut ivrs = Self {
            header,
            info: IvInfo(bytes.u32(36)?),
            blocks: bytes.from(TABLE_BYTES)?,
            highest: 0,
        };
        for block in ivrs.checked() {
            if let IvrsBlock::Hardware(ivhd) = block? {
                ivrs.highest = ivrs.highest.max(ivhd.kind);
            }
        }
        Ok(ivrs)
    }

    fn checked(&self) -> impl Iterator<Item = Result<IvrsBlock<'a>, FirmwareError>> + use<'a> {
        Records::new(self.blocks, 4, |rest| rest.u16(2).map(usize::from)).map(|record| {
            let record = record?;
            Ok(match record.u8(0)? {
                kind @ (0x10 | 0x11 | 0x40) => IvrsBlock::Hardware(Ivhd::parse(&record, kind)?),
                kind @ 0x20..=0x22 => IvrsBlock::Memory(Ivmd::parse(&record, kind)?),
                other => IvrsBlock::Other(other),
            })
        })
    }

    /// Returns all blocks, in the order of the table. Firmware may describe a unit by one block of
    /// each type.
    pub fn blocks(&self) -> impl Iterator<Item = IvrsBlock<'a>> + use<'a> {
        self.checked().flatten()
    }

    /// Returns the units: the blocks of the highest type in the table. Software uses the highest
    /// type that it supports and ignores the others.
    pub fn units(&self) -> impl Iterator<Item = Ivhd<'a>> + use<'a> {
        let highest = self.highest;
        self.blocks().filter_map(move |block| match block {
            IvrsBlock::Hardware(ivhd) if ivhd.kind == highest => Some(ivhd),
            _ => None,
        })
    }

    /// Returns the unit that translates a device, and the device's entry: the last one that names
    /// the device, else an entry for all devices.
    pub fn unit_of(&self, segment: u16, requester: RequesterId) -> Option<IvrsDevice<'a>> {
        let mut named = None;
        let mut all = None;
        for unit in self.units().filter(|unit| unit.segment == segment) {
            for entry in unit.devices() {
                let Some(alias) = entry.alias_of(requester) else {
                    continue;
                };
                let found = Some(IvrsDevice {
                    unit,
                    alias,
                    settings: entry.settings,
                    extended: entry.extended,
                });
                match entry.kind {
                    DeviceEntryKind::All => all = all.or(found),
                    _ => named = found,
                }
            }
        }
        named.or(all)
    }

    /// Returns the regions that firmware reserves for a device (IVMD). The regions
    /// [`X86_INTERRUPTS`](crate::X86_INTERRUPTS) and [`HYPERTRANSPORT`](crate::HYPERTRANSPORT) are
    /// not in the table.
    pub fn reserved_regions(
        &self,
        segment: u16,
        requester: RequesterId,
    ) -> impl Iterator<Item = ReservedRegion> + use<'a> {
        self.blocks().filter_map(move |block| match block {
            IvrsBlock::Memory(ivmd) if ivmd.names(segment, requester) => Some(ivmd.region),
            _ => None,
        })
    }
}
