//! RIMT: the units of RISC-V (RISC-V IO Mapping Table specification 1.0).

use ringfence_types::{PhysAddr, RequesterId};

use crate::acpi::{self, AcpiHeader};
use crate::bytes::{Bytes, Records};
use crate::endpoint::Endpoint;
use crate::error::{FirmwareError, FirmwareErrorKind};
use crate::id_mapping::{IdMapping, Mappings};

/// The RISC-V IO mapping table. All of its nodes have been checked.
#[derive(Debug, Clone, Copy)]
pub struct Rimt<'a> {
    /// Fields of the ACPI header.
    pub header: AcpiHeader,
    nodes: Bytes<'a>,
    count: u32,
    /// Length of the table, which bounds references.
    length: usize,
}

/// A node of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RimtNode<'a> {
    /// Unique number of the node.
    pub id: u16,
    /// Content, by type.
    pub kind: RimtNodeKind<'a>,
    offset: usize,
    mappings: Mappings<'a>,
}

/// Content of a node, by type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RimtNodeKind<'a> {
    /// A RISC-V IOMMU.
    Iommu(RimtIommu<'a>),
    /// A PCIe root complex.
    RootComplex {
        /// PCI segment of its devices.
        segment: u16,
        /// It supports ATS.
        ats: bool,
        /// It supports page requests.
        pri: bool,
    },
    /// A device of the ACPI namespace.
    PlatformDevice {
        /// Path of the object in the namespace, without a terminating zero.
        name: &'a [u8],
    },
    /// A type that the specification reserves.
    Other(u8),
}

/// A RISC-V IOMMU (section "IOMMU Node").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RimtIommu<'a> {
    /// ACPI ID of a platform device, or vendor and device ID of a PCIe device.
    pub hardware_id: [u8; 8],
    /// Place of the registers.
    pub location: IommuLocation,
    /// Proximity domain, if firmware gives one.
    pub proximity_domain: Option<u32>,
    wires: Bytes<'a>,
}

/// Place of a unit's registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IommuLocation {
    /// A fixed address.
    Platform(PhysAddr),
    /// The unit is a PCIe device; its BAR has the address.
    Pcie {
        /// Segment of the device.
        segment: u16,
        /// The requester ID of the unit.
        device: RequesterId,
    },
}

/// A wired interrupt of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterruptWire {
    /// Global system interrupt.
    pub gsi: u32,
    /// Mode (bit 0, 1 is level) and polarity (bit 1, 1 is active high).
    pub flags: u32,
}

impl RimtIommu<'_> {
    /// Returns the wired interrupts; none if the unit sends messages.
    pub fn wires(&self) -> impl Iterator<Item = InterruptWire> {
        let chunks = self.wires.data().as_chunks::<8>().0;
        chunks.iter().map(|[a, b, c, d, e, f, g, h]| InterruptWire {
            gsi: u32::from_le_bytes([*a, *b, *c, *d]),
            flags: u32::from_le_bytes([*e, *f, *g, *h]),
        })
    }
}

impl<'a> RimtNode<'a> {
    fn parse(bytes: &Bytes<'a>, end: usize) -> Result<Self, FirmwareError> {
        let mappings = |at: usize| {
            let [offset, count] = [bytes.u16(at)?, bytes.u16(at.saturating_add(2))?];
            Mappings::parse(bytes, offset.into(), count.into(), 0, end)
        };
        let none = || Mappings::parse(bytes, 0, 0, 0, end);
        let (kind, mappings) = match bytes.u8(0)? {
            0 => (RimtNodeKind::Iommu(Self::iommu(bytes)?), none()?),
            1 => {
                bytes.at_least(20)?;
                let flags = bytes.u32(8)?;
                let root = RimtNodeKind::RootComplex {
                    segment: bytes.u16(14)?,
                    ats: flags & 1 != 0,
                    pri: flags & 2 != 0,
                };
                (root, mappings(16)?)
            }
            2 => {
                bytes.at_least(13)?;
                let name = bytes.text(12, bytes.len())?;
                (RimtNodeKind::PlatformDevice { name }, mappings(8)?)
            }
            other => (RimtNodeKind::Other(other), none()?),
        };
        Ok(Self {
            id: bytes.u16(6)?,
            kind,
            offset: bytes.offset(),
            mappings,
        })
    }

    fn iommu(bytes: &Bytes<'a>) -> Result<RimtIommu<'a>, FirmwareError> {
        bytes.at_least(40)?;
        let flags = bytes.u32(24)?;
        let wires = match bytes.u16(36)? {
            0 => Bytes::EMPTY,
            count => bytes.part(bytes.u16(38)?.into(), usize::from(count).saturating_mul(8))?,
        };
        let pcie = IommuLocation::Pcie {
            segment: bytes.u16(32)?,
            device: RequesterId::new(bytes.u16(34)?),
        };
        let platform = IommuLocation::Platform(PhysAddr::new(bytes.u64(16)?));
        let domain = bytes.u32(28)?;
        Ok(RimtIommu {
            hardware_id: bytes.array(8)?,
            location: if flags & 1 != 0 { pcie } else { platform },
            proximity_domain: (flags & 2 != 0).then_some(domain),
            wires,
        })
    }

    /// Returns the ID mappings: from requester IDs, or from IDs that a driver knows, to the unit's
    /// `device_id`. Flags: ATS required (bit 0), page requests required (bit 1).
    pub fn mappings(&self) -> impl Iterator<Item = IdMapping> + use<'a> {
        self.mappings.iter()
    }
}

impl<'a> Rimt<'a> {
    /// Checks a table. Bytes after its end are ignored.
    ///
    /// # Errors
    /// The first error of the table.
    pub fn new(table: &'a [u8]) -> Result<Self, FirmwareError> {
        let (header, bytes) = acpi::check(table, b"RIMT", 1)?;
        let first = usize::try_from(bytes.u32(40)?).unwrap_or(usize::MAX);
        let rimt = Self {
            header,
            nodes: bytes.from(first)?,
            count: bytes.u32(36)?,
            length: bytes.len(),
        };
        rimt.checked().try_for_each(|node| node.map(|_| ()))?;
        Ok(rimt)
    }

    fn checked(&self) -> impl Iterator<Item = Result<RimtNode<'a>, FirmwareError>> + use<'a> {
        let end = self.length;
        Records::new(self.nodes, 8, |rest| rest.u16(2).map(usize::from))
            .limited_to(self.count)
            .map(move |record| RimtNode::parse(&record?, end))
    }

    /// Returns all nodes, in the order of the table.
    pub fn nodes(&self) -> impl Iterator<Item = RimtNode<'a>> + use<'a> {
        self.checked().flatten()
    }

    /// Returns the units.
    pub fn units(&self) -> impl Iterator<Item = RimtIommu<'a>> + use<'a> {
        self.nodes().filter_map(|node| match node.kind {
            RimtNodeKind::Iommu(iommu) => Some(iommu),
            _ => None,
        })
    }

    /// Returns the unit that translates a PCI device, with the `device_id` of its accesses.
    ///
    /// # Errors
    /// The mapping of the device refers to no unit.
    pub fn unit_of(
        &self,
        segment: u16,
        requester: RequesterId,
    ) -> Result<Option<Endpoint<RimtIommu<'a>>>, FirmwareError> {
        let ours = |node: &RimtNode<'a>| match node.kind {
            RimtNodeKind::RootComplex { segment: here, .. } => here == segment,
            _ => false,
        };
        for node in self.nodes().filter(ours) {
            if let Some(found) = self.map(&node, u32::from(requester.get()))? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Returns the unit that receives the ID `id` of `node`, with the `device_id`.
    ///
    /// # Errors
    /// The mapping of the ID refers to no unit.
    pub fn map(
        &self,
        node: &RimtNode<'a>,
        id: u32,
    ) -> Result<Option<Endpoint<RimtIommu<'a>>>, FirmwareError> {
        let found = |mapping: IdMapping| Some((mapping.map(id)?, mapping.reference));
        let Some((id, reference)) = node.mappings().find_map(found) else {
            return Ok(None);
        };
        let at = usize::try_from(reference).unwrap_or(usize::MAX);
        let target = self.nodes().find(|target| target.offset == at);
        match target.map(|target| target.kind) {
            Some(RimtNodeKind::Iommu(unit)) => Ok(Some(Endpoint { unit, id })),
            _ => Err(FirmwareErrorKind::Reference.at(node.offset)),
        }
    }
}
