//! IOMMUs in a device tree: the bindings `riscv,iommu`, `arm,smmu-v3`, `virtio,iommu` and
//! `pci-iommu`, and the generic properties `iommus` and `iommu-map`.

use ringfence_types::{PhysRange, RequesterId};

use crate::bytes::Bytes;
use crate::endpoint::Endpoint;
use crate::error::{FirmwareError, FirmwareErrorKind};
use crate::fdt::{Blocks, RawNode, Walk};

/// Bytes of an entry of `iommu-map`: requester ID, phandle, ID, number of IDs.
const MAP_BYTES: usize = 16;

/// Most units in the `iommus` of one device, so that the time of a lookup is bounded.
const MAX_UNITS: usize = 16;

/// A flattened device tree. All of its nodes have been checked.
#[derive(Debug, Clone, Copy)]
pub struct DeviceTree<'a> {
    blocks: Blocks<'a>,
}

/// Kinds of units, by the `compatible` of their nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitKind {
    /// `riscv,iommu`, or `riscv,pci-iommu` if it is a PCI device.
    RiscV,
    /// An Arm SMMUv3, compatible with `arm,smmu-v3`.
    SmmuV3,
    /// `virtio,pci-iommu`, or `pci1af4,1057`.
    VirtioPci,
}

/// Place of a unit's registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitLocation {
    /// Registers in the physical address space.
    Mmio(PhysRange),
    /// The unit is a PCI device, on the bus of the host bridge above it.
    Pci(RequesterId),
}

/// A node that describes an IOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeUnit<'a> {
    /// Name of the node with its unit address, such as `iommu@3010000`.
    pub name: &'a [u8],
    /// Kind of the unit.
    pub kind: UnitKind,
    /// Place of the registers.
    pub location: UnitLocation,
    /// The number by which other nodes refer to it.
    pub phandle: Option<u32>,
    /// Cells of an ID in `iommus`.
    pub id_cells: u32,
}

/// A node that is a device behind units.
#[derive(Debug, Clone, Copy)]
pub struct TreeDevice<'a> {
    /// Name of the node with its unit address.
    pub name: &'a [u8],
    /// The number by which other nodes refer to it.
    pub phandle: Option<u32>,
    iommus: Bytes<'a>,
}

impl<'a> DeviceTree<'a> {
    /// Checks a tree. Bytes after its end are ignored.
    ///
    /// # Errors
    /// The first error of the tree.
    pub fn new(tree: &'a [u8]) -> Result<Self, FirmwareError> {
        let blocks = Blocks::new(tree)?;
        let mut walk = blocks.walk();
        while let Some(node) = walk.next() {
            let node = node?;
            unit(&walk, &node)?;
            let map = node.properties.iommu_map;
            if map.len() % MAP_BYTES != 0 {
                return Err(map.error(0, FirmwareErrorKind::Property));
            }
            for at in (0..map.len()).step_by(MAP_BYTES) {
                IommuMap::parse(&map, at)?;
            }
            let (iommus, mask) = (node.properties.iommus, node.properties.iommu_map_mask);
            if iommus.len() % 4 != 0 {
                return Err(iommus.error(0, FirmwareErrorKind::Property));
            }
            if !matches!(mask.len(), 0 | 4) {
                return Err(mask.error(0, FirmwareErrorKind::Property));
            }
        }
        Ok(Self { blocks })
    }

    fn nodes(&self) -> impl Iterator<Item = RawNode<'a>> + use<'a> {
        self.blocks.walk().flatten()
    }

    /// Returns the units that are not disabled, in the order of the tree.
    pub fn units(&self) -> impl Iterator<Item = TreeUnit<'a>> + use<'a> {
        let mut walk = self.blocks.walk();
        core::iter::from_fn(move || {
            loop {
                let node = walk.next()?.ok()?;
                if let Ok(Some(found)) = unit(&walk, &node) {
                    return Some(found);
                }
            }
        })
    }

    /// Returns the nodes with an `iommus` property.
    pub fn devices(&self) -> impl Iterator<Item = TreeDevice<'a>> + use<'a> {
        let behind = |node: &RawNode<'a>| !node.properties.iommus.is_empty();
        self.nodes().filter(behind).map(|node| TreeDevice {
            name: node.name,
            phandle: node.properties.phandle,
            iommus: node.properties.iommus,
        })
    }

    /// Returns the units of a device of [`devices`](Self::devices), with its IDs there.
    ///
    /// # Errors
    /// An entry refers to no unit, or its ID has more than one cell; or there are more than 16.
    pub fn units_of_device(
        &self,
        device: &TreeDevice<'a>,
    ) -> impl Iterator<Item = Result<Endpoint<TreeUnit<'a>>, FirmwareError>> + use<'a> {
        let (tree, iommus) = (*self, device.iommus);
        let mut at = 0_usize;
        let mut left = MAX_UNITS;
        core::iter::from_fn(move || {
            if at >= iommus.len() {
                return None;
            }
            let found = match left {
                0 => Err(iommus.error(at, FirmwareErrorKind::TooManyEntries)),
                _ => tree.endpoint(&iommus, at),
            };
            left = left.saturating_sub(1);
            at = match &found {
                Ok((_, next)) => *next,
                Err(_) => usize::MAX,
            };
            Some(found.map(|(endpoint, _)| endpoint))
        })
    }

    /// Reads the entry of `iommus` at `at`. Returns the offset of the next entry too.
    fn endpoint(
        &self,
        iommus: &Bytes<'a>,
        at: usize,
    ) -> Result<(Endpoint<TreeUnit<'a>>, usize), FirmwareError> {
        let unit = self.unit_at(iommus.cell(at)?);
        let unit = unit.ok_or_else(|| iommus.error(at, FirmwareErrorKind::Reference))?;
        let cells = at.saturating_add(4);
        let (id, next) = match unit.id_cells {
            0 => (0, cells),
            1 => (iommus.cell(cells)?, cells.saturating_add(4)),
            _ => return Err(iommus.error(at, FirmwareErrorKind::Property)),
        };
        Ok((Endpoint { unit, id }, next))
    }

    /// Returns the unit that translates a PCI device, with its ID there: by the `iommu-map` of the
    /// host bridge with the PCI domain `segment`. A bridge without a domain number has segment 0.
    ///
    /// # Errors
    /// The map refers to no unit.
    pub fn unit_of(
        &self,
        segment: u16,
        requester: RequesterId,
    ) -> Result<Option<Endpoint<TreeUnit<'a>>>, FirmwareError> {
        for node in self.nodes() {
            let properties = node.properties;
            if properties.pci_domain.unwrap_or(0) != u32::from(segment) {
                continue;
            }
            let map = properties.iommu_map;
            let mask = match properties.iommu_map_mask.is_empty() {
                true => u32::MAX,
                false => properties.iommu_map_mask.cell(0)?,
            };
            let input = u32::from(requester.get()) & mask;
            for at in (0..map.len()).step_by(MAP_BYTES) {
                let entry = IommuMap::parse(&map, at)?;
                let Some(id) = entry.map(input) else {
                    continue;
                };
                let at = at.saturating_add(4);
                let unit = self.unit_at(entry.phandle);
                let unit = unit.ok_or_else(|| map.error(at, FirmwareErrorKind::Reference))?;
                return Ok(Some(Endpoint { unit, id }));
            }
        }
        Ok(None)
    }

    fn unit_at(&self, phandle: u32) -> Option<TreeUnit<'a>> {
        self.units().find(|unit| unit.phandle == Some(phandle))
    }
}

/// An entry of `iommu-map`.
struct IommuMap {
    first: u32,
    phandle: u32,
    output: u32,
    ids: u32,
}

impl IommuMap {
    fn parse(map: &Bytes<'_>, at: usize) -> Result<Self, FirmwareError> {
        let entry = map.part(at, MAP_BYTES)?;
        let map = Self {
            first: entry.cell(0)?,
            phandle: entry.cell(4)?,
            output: entry.cell(8)?,
            ids: entry.cell(12)?,
        };
        let more = map.ids.saturating_sub(1);
        let last = map.first.max(map.output).checked_add(more);
        last.ok_or_else(|| entry.error(12, FirmwareErrorKind::Range))?;
        Ok(map)
    }

    fn map(&self, input: u32) -> Option<u32> {
        let distance = input.checked_sub(self.first)?;
        if distance >= self.ids {
            return None;
        }
        self.output.checked_add(distance)
    }
}

/// Returns the unit that `node` describes. `None` if it is none, or disabled.
fn unit<'a>(walk: &Walk<'a>, node: &RawNode<'a>) -> Result<Option<TreeUnit<'a>>, FirmwareError> {
    let properties = &node.properties;
    let enabled = matches!(properties.status.data(), b"" | b"okay\0" | b"ok\0");
    let mut names = properties.compatible.data().split(|byte| *byte == 0);
    let Some((kind, pci)) = names.find_map(unit_kind).filter(|_| enabled) else {
        return Ok(None);
    };
    let location = match pci || node.on_pci {
        true => UnitLocation::Pci(pci_device(node)?),
        false => UnitLocation::Mmio(walk.registers(node)?),
    };
    Ok(Some(TreeUnit {
        name: node.name,
        kind,
        location,
        phandle: properties.phandle,
        id_cells: properties.iommu_cells.unwrap_or(1),
    }))
}

/// Returns the kind of units with a name in `compatible`, and true if they are PCI devices.
fn unit_kind(name: &[u8]) -> Option<(UnitKind, bool)> {
    match name {
        b"riscv,iommu" => Some((UnitKind::RiscV, false)),
        b"riscv,pci-iommu" => Some((UnitKind::RiscV, true)),
        b"arm,smmu-v3" => Some((UnitKind::SmmuV3, false)),
        b"virtio,pci-iommu" | b"pci1af4,1057" => Some((UnitKind::VirtioPci, true)),
        _ => None,
    }
}

/// Reads the first cell of a PCI device's `reg`, which has the requester ID in bits 23:8 (PCI Bus
/// Binding to Open Firmware, section 2.2.1.1).
fn pci_device(node: &RawNode<'_>) -> Result<RequesterId, FirmwareError> {
    let cell = node.properties.reg.cell(0);
    let cell = cell.map_err(|_| FirmwareErrorKind::Registers.at(node.offset))?;
    Ok(RequesterId::new((cell >> 8) as u16))
}
