//! VIOT: the virtio-iommu devices of a virtual machine (ACPI 6.5, "Virtual I/O Translation (VIOT)
//! Table").

use ringfence_types::{PhysAddr, RequesterId};

use crate::acpi::{self, AcpiHeader};
use crate::bytes::{Bytes, Records};
use crate::endpoint::Endpoint;
use crate::error::{FirmwareError, FirmwareErrorKind};

/// The virtual I/O translation table. All of its nodes have been checked.
#[derive(Debug, Clone, Copy)]
pub struct Viot<'a> {
    /// Fields of the ACPI header.
    pub header: AcpiHeader,
    nodes: Bytes<'a>,
    count: u16,
}

/// A node of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViotNode {
    /// PCI devices behind a unit.
    PciRange {
        /// First and last segment.
        segments: [u16; 2],
        /// First and last device, in each of the segments.
        devices: [RequesterId; 2],
        /// Endpoint ID of the first device of the first segment. A segment has 2^16 IDs.
        endpoint: u32,
        /// Offset of the unit's node in the table.
        output: u16,
    },
    /// A device at a fixed address behind a unit.
    Mmio {
        /// Address of the device's registers.
        registers: PhysAddr,
        /// Endpoint ID of the device.
        endpoint: u32,
        /// Offset of the unit's node in the table.
        output: u16,
    },
    /// A virtio-iommu device and its transport.
    Unit(ViotUnit),
    /// A type that the specification reserves; software ignores it.
    Other(u8),
}

/// A virtio-iommu device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViotUnit {
    /// A PCI device.
    Pci {
        /// Segment of the device.
        segment: u16,
        /// The requester ID of the unit.
        device: RequesterId,
    },
    /// A device of the MMIO transport.
    Mmio(PhysAddr),
}

impl ViotNode {
    fn parse(bytes: &Bytes<'_>) -> Result<Self, FirmwareError> {
        let required = match bytes.u8(0)? {
            1 | 2 => 24,
            3 | 4 => 16,
            other => return Ok(Self::Other(other)),
        };
        bytes.at_least(required)?;
        Ok(match bytes.u8(0)? {
            1 => Self::pci_range(bytes)?,
            2 => Self::Mmio {
                registers: PhysAddr::new(bytes.u64(8)?),
                endpoint: bytes.u32(4)?,
                output: bytes.u16(16)?,
            },
            3 => Self::Unit(ViotUnit::Pci {
                segment: bytes.u16(4)?,
                device: RequesterId::new(bytes.u16(6)?),
            }),
            _ => Self::Unit(ViotUnit::Mmio(PhysAddr::new(bytes.u64(8)?))),
        })
    }

    fn pci_range(bytes: &Bytes<'_>) -> Result<Self, FirmwareError> {
        let segments = [bytes.u16(8)?, bytes.u16(10)?];
        let devices = [bytes.u16(12)?, bytes.u16(14)?];
        let endpoint = bytes.u32(4)?;
        let span = |[first, last]: [u16; 2]| last.checked_sub(first).map(u32::from);
        let last = span(segments)
            .zip(span(devices))
            .and_then(|(segments, devices)| endpoint.checked_add(segments << 16 | devices));
        if last.is_none() {
            return Err(bytes.error(8, FirmwareErrorKind::Range));
        }
        Ok(Self::PciRange {
            segments,
            devices: devices.map(RequesterId::new),
            endpoint,
            output: bytes.u16(16)?,
        })
    }

    /// Returns the endpoint ID of a PCI device and the offset of its unit.
    fn endpoint_of(&self, segment: u16, requester: RequesterId) -> Option<(u32, u16)> {
        let Self::PciRange {
            segments: [first_segment, last_segment],
            devices: [first, last],
            endpoint,
            output,
        } = *self
        else {
            return None;
        };
        if segment > last_segment || requester > last {
            return None;
        }
        let segment = segment.checked_sub(first_segment)?;
        let device = requester.get().checked_sub(first.get())?;
        let id = u32::from(segment) << 16 | u32::from(device);
        Some((endpoint.checked_add(id)?, output))
    }
}

impl<'a> Viot<'a> {
    /// Checks a table. Bytes after its end are ignored.
    ///
    /// # Errors
    /// The first error of the table.
    pub fn new(table: &'a [u8]) -> Result<Self, FirmwareError> {
        let (header, bytes) = acpi::check(table, b"VIOT", 0)?;
        let count = bytes.u16(36)?;
        let viot = Self {
            header,
            nodes: bytes.from(usize::from(bytes.u16(38)?))?,
            count,
        };
        viot.checked().try_for_each(|node| node.map(|_| ()))?;
        Ok(viot)
    }

    fn checked(&self) -> impl Iterator<Item = Result<(usize, ViotNode), FirmwareError>> + use<'a> {
        Records::new(self.nodes, 4, |rest| rest.u16(2).map(usize::from))
            .limited_to(u32::from(self.count))
            .map(|record| {
                let record = record?;
                Ok((record.offset(), ViotNode::parse(&record)?))
            })
    }

    /// Returns all nodes, in the order of the table.
    pub fn nodes(&self) -> impl Iterator<Item = ViotNode> + use<'a> {
        self.checked().flatten().map(|(_, node)| node)
    }

    /// Returns the units.
    pub fn units(&self) -> impl Iterator<Item = ViotUnit> + use<'a> {
        self.nodes().filter_map(|node| match node {
            ViotNode::Unit(unit) => Some(unit),
            _ => None,
        })
    }

    /// Returns the unit that translates a PCI device, with the device's endpoint ID. A unit does
    /// not translate its own accesses, even if a range contains it.
    ///
    /// # Errors
    /// The device's node names a unit that does not exist.
    pub fn unit_of(
        &self,
        segment: u16,
        requester: RequesterId,
    ) -> Result<Option<Endpoint<ViotUnit>>, FirmwareError> {
        let found = |(at, node): (usize, ViotNode)| {
            let (id, output) = node.endpoint_of(segment, requester)?;
            Some((at, id, output))
        };
        let Some((at, id, output)) = self.checked().flatten().find_map(found) else {
            return Ok(None);
        };
        let unit = self.unit_at(at, output)?;
        let own = ViotUnit::Pci {
            segment,
            device: requester,
        };
        Ok((unit != own).then_some(Endpoint { unit, id }))
    }

    /// Returns the unit that translates the device with registers at `registers`.
    ///
    /// # Errors
    /// The device's node names a unit that does not exist.
    pub fn unit_of_mmio(
        &self,
        registers: PhysAddr,
    ) -> Result<Option<Endpoint<ViotUnit>>, FirmwareError> {
        for (at, node) in self.checked().flatten() {
            if let ViotNode::Mmio {
                registers: here,
                endpoint: id,
                output,
            } = node
                && here == registers
            {
                let unit = self.unit_at(at, output)?;
                return Ok(Some(Endpoint { unit, id }));
            }
        }
        Ok(None)
    }

    /// Returns the unit at `output`, to which the node at `at` refers.
    fn unit_at(&self, at: usize, output: u16) -> Result<ViotUnit, FirmwareError> {
        let output = usize::from(output);
        let mut nodes = self.checked().flatten();
        match nodes.find(|(offset, _)| *offset == output) {
            Some((_, ViotNode::Unit(unit))) => Ok(unit),
            _ => Err(FirmwareErrorKind::Reference.at(at.saturating_add(16))),
        }
    }
}
