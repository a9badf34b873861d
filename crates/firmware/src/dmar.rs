//! DMAR: the units of Intel VT-d (VT-d specification, chapter 8).

use ringfence_types::{Iova, IovaRange, Permissions, PhysAddr, RequesterId};

use crate::acpi::{self, AcpiHeader};
use crate::bytes::{Bytes, Records};
use crate::error::{FirmwareError, FirmwareErrorKind};
use crate::reserved::{ReservedRegion, Treatment};
use crate::scope::Scopes;
use crate::topology::PciTopology;

/// Length of the table before the remapping structures.
const TABLE_BYTES: usize = 48;

/// The DMA remapping reporting table. All of its structures have been checked.
#[derive(Debug, Clone, Copy)]
pub struct Dmar<'a> {
    /// Fields of the ACPI header.
    pub header: AcpiHeader,
    /// Largest width of a DMA address in bits (field "Host Address Width" plus 1).
    pub host_address_width: u16,
    /// Flags of the platform.
    pub flags: DmarFlags,
    structures: Bytes<'a>,
}

/// Flags of the whole platform (section 8.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmarFlags(u8);

impl DmarFlags {
    /// Returns true if the platform supports interrupt remapping (`INTR_REMAP`).
    pub const fn interrupt_remapping(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns true if firmware asks not to enable x2APIC mode (`X2APIC_OPT_OUT`, which is valid
    /// with `INTR_REMAP` only).
    pub const fn x2apic_opt_out(self) -> bool {
        self.0 & 3 == 3
    }

    /// Returns true if firmware asks to keep DMA confined until the operating system takes over
    /// (`DMA_CTRL_PLATFORM_OPT_IN_FLAG`).
    pub const fn dma_control(self) -> bool {
        self.0 & 4 != 0
    }
}

/// A remapping structure (section 8.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmarStructure<'a> {
    /// A VT-d unit and the devices behind it.
    Drhd(Drhd<'a>),
    /// Reserved memory of devices.
    Rmrr(Rmrr<'a>),
    /// Root ports that support ATS.
    Atsr {
        /// PCI segment of the root ports.
        segment: u16,
        /// All root ports of the segment support ATS (`ALL_PORTS`); there are no scopes.
        all_ports: bool,
        /// The root ports.
        ports: Scopes<'a>,
    },
    /// NUMA domain of the unit at an address.
    Rhsa {
        /// Address of the unit's registers.
        registers: PhysAddr,
        /// Proximity domain as in SRAT.
        proximity_domain: u32,
    },
    /// Name of a device that has no PCI configuration space.
    Andd {
        /// Enumeration ID of the device's scopes.
        number: u8,
        /// Path of the object in the ACPI namespace, without a terminating zero.
        name: &'a [u8],
    },
    /// Devices on the chip that have an address translation cache.
    Satc {
        /// PCI segment of the devices.
        segment: u16,
        /// The devices need their cache (`ATC_REQUIRED`).
        required: bool,
        /// The devices that the structure names.
        devices: Scopes<'a>,
    },
    /// Properties of devices on the chip, in the flags of their scopes.
    Sidp {
        /// PCI segment of the devices.
        segment: u16,
        /// The devices that the structure names.
        devices: Scopes<'a>,
    },
    /// A type that the specification reserves; software ignores it.
    Other(u16),
}

/// A unit: "DMA remapping hardware unit definition" (section 8.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drhd<'a> {
    /// PCI segment of the devices.
    pub segment: u16,
    /// The unit translates all devices of the segment that no other unit names
    /// (`INCLUDE_PCI_ALL`).
    pub include_pci_all: bool,
    /// Address of the registers.
    pub registers: PhysAddr,
    /// Length of the registers in bytes: 4 KiB times a power of two.
    pub register_bytes: u64,
    /// The devices, or those without requester ID if `include_pci_all`.
    pub devices: Scopes<'a>,
}

/// "Reserved memory region reporting" (section 8.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rmrr<'a> {
    /// PCI segment of the devices.
    pub segment: u16,
    /// The region: I/O virtual and physical addresses.
    pub range: IovaRange,
    /// The devices that use it.
    pub devices: Scopes<'a>,
}

impl<'a> DmarStructure<'a> {
    fn parse(bytes: &Bytes<'a>) -> Result<Self, FirmwareError> {
        let scopes = |from| Scopes::parse(bytes.from(from)?);
        Ok(match bytes.u16(0)? {
            0 => {
                bytes.at_least(16)?;
                Self::Drhd(Drhd {
                    segment: bytes.u16(6)?,
                    include_pci_all: bytes.u8(4)? & 1 != 0,
                    registers: PhysAddr::new(bytes.u64(8)?),
                    register_bytes: 4096 << (bytes.u8(5)? & 0xf),
                    devices: scopes(16)?,
                })
            }
            1 => {
                bytes.at_least(24)?;
                let [first, last] = [bytes.u64(8)?, bytes.u64(16)?].map(Iova::new);
                let range = IovaRange::inclusive(first, last);
                Self::Rmrr(Rmrr {
                    segment: bytes.u16(6)?,
                    range: range.ok_or_else(|| bytes.error(8, FirmwareErrorKind::Range))?,
                    devices: scopes(24)?,
                })
            }
            2 => Self::Atsr {
                segment: Self::segment(bytes)?,
                all_ports: bytes.u8(4)? & 1 != 0,
                ports: scopes(8)?,
            },
            3 => {
                bytes.at_least(20)?;
                Self::Rhsa {
                    registers: PhysAddr::new(bytes.u64(8)?),
                    proximity_domain: bytes.u32(16)?,
                }
            }
            4 => {
                bytes.at_least(9)?;
                Self::Andd {
                    number: bytes.u8(7)?,
                    name: bytes.text(8, bytes.len())?,
                }
            }
            5 => Self::Satc {
                segment: Self::segment(bytes)?,
                required: bytes.u8(4)? & 1 != 0,
                devices: scopes(8)?,
            },
            6 => Self::Sidp {
                segment: Self::segment(bytes)?,
                devices: scopes(8)?,
            },
            other => Self::Other(other),
        })
    }

    fn segment(bytes: &Bytes<'a>) -> Result<u16, FirmwareError> {
        bytes.at_least(8)?;
        bytes.u16(6)
    }
}

impl<'a> Dmar<'a> {
    /// Checks a table. Bytes after its end are ignored.
    ///
    /// # Errors
    /// The first error of the table.
    pub fn new(table: &'a [u8]) -> Result<Self, FirmwareError> {
        let (header, bytes) = acpi::check(table, b"DMAR", 1)?;
        let dmar = Self {
            header,
            host_address_width: u16::from(bytes.u8(36)?).saturating_add(1),
            flags: DmarFlags(bytes.u8(37)?),
            structures: bytes.from(TABLE_BYTES)?,
        };
        dmar.checked()
            .try_for_each(|structure| structure.map(|_| ()))?;
        Ok(dmar)
    }

    fn checked(&self) -> impl Iterator<Item = Result<DmarStructure<'a>, FirmwareError>> + use<'a> {
        Records::new(self.structures, 4, |rest| rest.u16(2).map(usize::from))
            .map(|record| record.and_then(|record| DmarStructure::parse(&record)))
    }

    /// Returns all structures, in the order of the table.
    pub fn structures(&self) -> impl Iterator<Item = DmarStructure<'a>> + use<'a> {
        self.checked().flatten()
    }

    /// Returns the units.
    pub fn units(&self) -> impl Iterator<Item = Drhd<'a>> + use<'a> {
        self.structures().filter_map(|structure| match structure {
            DmarStructure::Drhd(drhd) => Some(drhd),
            _ => None,
        })
    }

    /// Returns the unit that translates a device: the one that names it or a bridge above it, else
    /// the one with `INCLUDE_PCI_ALL` of its segment (section 8.3). For a virtual function, ask
    /// with the requester ID of its physical function.
    pub fn unit_of(
        &self,
        segment: u16,
        requester: RequesterId,
        topology: &impl PciTopology,
    ) -> Option<Drhd<'a>> {
        let mut units = self.units().filter(|unit| unit.segment == segment);
        let named = units.find(|unit| unit.devices.cover(segment, requester, topology));
        named.or_else(|| {
            let mut units = self.units().filter(|unit| unit.segment == segment);
            units.find(|unit| unit.include_pci_all)
        })
    }

    /// Returns the regions that firmware reserves for a device (RMRR). The interrupt region
    /// [`X86_INTERRUPTS`](crate::X86_INTERRUPTS) is not in the table.
    pub fn reserved_regions<T: PciTopology>(
        &self,
        segment: u16,
        requester: RequesterId,
        topology: T,
    ) -> impl Iterator<Item = ReservedRegion> + use<'a, T> {
        self.structures()
            .filter_map(move |structure| match structure {
                DmarStructure::Rmrr(rmrr)
                    if rmrr.segment == segment
                        && rmrr.devices.cover(segment, requester, &topology) =>
                {
                    Some(ReservedRegion {
                        range: rmrr.range,
                        treatment: Treatment::Identity(Permissions::READ_WRITE),
                    })
                }
                _ => None,
            })
    }
}
