//! Flattened device trees (Devicetree Specification 0.4, chapter 5): the nodes in order, each with
//! the properties that lookups of IOMMUs need.

use core::iter::FusedIterator;

use ringfence_types::{PhysAddr, PhysRange};

use crate::bytes::Bytes;
use crate::error::{FirmwareError, FirmwareErrorKind};

/// Most nodes on a path from the root. Linux permits 64 levels; trees of machines have about 8.
pub const MAX_DEPTH: usize = 32;

/// Most entries of a `ranges` property, so that the time to translate an address is bounded.
const MAX_RANGES: usize = 64;

/// Longest property name. The specification permits 31 characters; trees of machines exceed that.
const MAX_NAME: usize = 256;

const MAGIC: u32 = 0xd00d_feed;
const HEADER_BYTES: usize = 40;

const BEGIN_NODE: u32 = 1;
const END_NODE: u32 = 2;
const PROP: u32 = 3;
const NOP: u32 = 4;
const END: u32 = 9;

/// The blocks of a tree.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks<'a> {
    structure: Bytes<'a>,
    strings: Bytes<'a>,
}

impl<'a> Blocks<'a> {
    /// Checks the header (section 5.2). Memory reservations are ignored.
    pub(crate) fn new(tree: &'a [u8]) -> Result<Self, FirmwareError> {
        let bytes = Bytes::table(tree);
        bytes.part(0, HEADER_BYTES)?;
        if bytes.cell(0)? != MAGIC {
            return Err(bytes.error(0, FirmwareErrorKind::Signature));
        }
        let field = |at| -> Result<usize, FirmwareError> {
            Ok(usize::try_from(bytes.cell(at)?).unwrap_or(usize::MAX))
        };
        if field(4)? < HEADER_BYTES {
            return Err(bytes.error(4, FirmwareErrorKind::TableLength));
        }
        // Version 17 has the size of the structure block; a tree must permit readers of 16 or 17.
        if field(20)? < 17 || field(24)? > 17 {
            return Err(bytes.error(20, FirmwareErrorKind::Revision));
        }
        let bytes = bytes
            .part(0, field(4)?)
            .map_err(|_| bytes.error(4, FirmwareErrorKind::Truncated))?;
        Ok(Self {
            structure: bytes.part(field(8)?, field(36)?)?,
            strings: bytes.part(field(12)?, field(32)?)?,
        })
    }

    pub(crate) fn walk(&self) -> Walk<'a> {
        Walk {
            blocks: *self,
            at: 0,
            depth: 0,
            levels: [Level::ROOT; MAX_DEPTH],
            state: State::Start,
        }
    }
}

/// The properties of one node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Properties<'a> {
    pub(crate) compatible: Bytes<'a>,
    pub(crate) reg: Bytes<'a>,
    pub(crate) status: Bytes<'a>,
    pub(crate) device_type: Bytes<'a>,
    pub(crate) iommu_map: Bytes<'a>,
    pub(crate) iommu_map_mask: Bytes<'a>,
    pub(crate) iommus: Bytes<'a>,
    pub(crate) phandle: Option<u32>,
    pub(crate) iommu_cells: Option<u32>,
    pub(crate) pci_domain: Option<u32>,
    address_cells: Option<u32>,
    size_cells: Option<u32>,
    ranges: Option<Bytes<'a>>,
}

impl<'a> Properties<'a> {
    const NONE: Self = Self {
        compatible: Bytes::EMPTY,
        reg: Bytes::EMPTY,
        status: Bytes::EMPTY,
        device_type: Bytes::EMPTY,
        iommu_map: Bytes::EMPTY,
        iommu_map_mask: Bytes::EMPTY,
        iommus: Bytes::EMPTY,
        phandle: None,
        iommu_cells: None,
        pci_domain: None,
        address_cells: None,
        size_cells: None,
        ranges: None,
    };

    fn set(&mut self, name: &[u8], value: Bytes<'a>) -> Result<(), FirmwareError> {
        let cell = || match value.len() {
            4 => value.cell(0).map(Some),
            _ => Err(value.error(0, FirmwareErrorKind::Property)),
        };
        match name {
            b"compatible" => self.compatible = value,
            b"reg" => self.reg = value,
            b"status" => self.status = value,
            b"device_type" => self.device_type = value,
            b"iommu-map" => self.iommu_map = value,
            b"iommu-map-mask" => self.iommu_map_mask = value,
            b"iommus" => self.iommus = value,
            b"phandle" | b"linux,phandle" => self.phandle = cell()?,
            b"#iommu-cells" => self.iommu_cells = cell()?,
            b"linux,pci-domain" => self.pci_domain = cell()?,
            b"#address-cells" => self.address_cells = cell()?,
            b"#size-cells" => self.size_cells = cell()?,
            b"ranges" => self.ranges = Some(value),
            _ => {}
        }
        Ok(())
    }
}

/// A node at the current position of a walk of the tree.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawNode<'a> {
    pub(crate) name: &'a [u8],
    /// Offset of the node in the tree's bytes.
    pub(crate) offset: usize,
    pub(crate) properties: Properties<'a>,
    /// The node is on a PCI bus.
    pub(crate) on_pci: bool,
}

/// A node on the path to the current one.
#[derive(Debug, Clone, Copy)]
struct Level<'a> {
    /// Cells of an address and of a size in the `reg` of its children.
    address: u32,
    size: u32,
    /// Translation of its children's addresses to its parent's; `None` without `ranges`.
    ranges: Option<Bytes<'a>>,
    is_pci: bool,
}

impl Level<'_> {
    const ROOT: Self = Self {
        address: 2,
        size: 1,
        ranges: None,
        is_pci: false,
    };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the root.
    Start,
    /// Behind a node's properties.
    Inside,
    /// Behind the root, or behind an error.
    End,
}

/// Iterator over the nodes of a tree, parents before children. It ends after an error.
#[derive(Debug, Clone)]
pub(crate) struct Walk<'a> {
    blocks: Blocks<'a>,
    at: usize,
    /// Nodes on the path to the current one, with it.
    depth: usize,
    levels: [Level<'a>; MAX_DEPTH],
    state: State,
}

impl<'a> Walk<'a> {
    /// Reads the next token that is not a NOP.
    fn token(&mut self) -> Result<u32, FirmwareError> {
        loop {
            let token = self.blocks.structure.cell(self.at)?;
            self.at = self.at.saturating_add(4);
            if token != NOP {
                return Ok(token);
            }
        }
    }

    /// Passes `bytes` bytes and the padding behind them.
    fn skip(&mut self, bytes: usize) {
        let end = self.at.saturating_add(bytes);
        self.at = end.checked_next_multiple_of(4).unwrap_or(usize::MAX);
    }

    fn bad_token(&self) -> FirmwareError {
        let at = self.at.saturating_sub(4);
        self.blocks.structure.error(at, FirmwareErrorKind::Token)
    }

    fn advance(&mut self) -> Result<Option<RawNode<'a>>, FirmwareError> {
        loop {
            match (self.token()?, self.state) {
                (BEGIN_NODE, State::Start | State::Inside) => return self.node().map(Some),
                (END_NODE, State::Inside) => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        self.state = State::End;
                    }
                }
                (END, State::End) => return Ok(None),
                _ => return Err(self.bad_token()),
            }
        }
    }

    /// Reads a node behind its first token, up to its first child or its end.
    fn node(&mut self) -> Result<RawNode<'a>, FirmwareError> {
        let begin = self.at.saturating_sub(4);
        let structure = self.blocks.structure;
        if self.depth >= MAX_DEPTH {
            return Err(structure.error(begin, FirmwareErrorKind::TooDeep));
        }
        let name = structure.text(self.at, structure.len())?;
        self.skip(name.len().saturating_add(1));
        let mut properties = Properties::NONE;
        while self.next_is_property()? {
            self.property(&mut properties)?;
        }
        let parent = self.parent();
        let level = Level {
            address: properties.address_cells.unwrap_or(2),
            size: properties.size_cells.unwrap_or(1),
            ranges: properties.ranges,
            is_pci: properties.device_type.data() == b"pci\0",
        };
        if let Some(slot) = self.levels.get_mut(self.depth) {
            *slot = level;
        }
        self.depth = self.depth.saturating_add(1);
        self.state = State::Inside;
        Ok(RawNode {
            name,
            offset: structure.offset().saturating_add(begin),
            properties,
            on_pci: parent.is_some_and(|parent| parent.is_pci),
        })
    }

    fn parent(&self) -> Option<Level<'a>> {
        self.levels.get(self.depth.checked_sub(1)?).copied()
    }

    /// Passes a PROP token, if it is the next one.
    fn next_is_property(&mut self) -> Result<bool, FirmwareError> {
        let token = self.token()?;
        if token != PROP {
            self.at = self.at.saturating_sub(4);
        }
        Ok(token == PROP)
    }

    fn property(&mut self, properties: &mut Properties<'a>) -> Result<(), FirmwareError> {
        let structure = self.blocks.structure;
        let length = usize::try_from(structure.cell(self.at)?).unwrap_or(usize::MAX);
        let name = usize::try_from(structure.cell(self.at.saturating_add(4))?);
        let value = structure.part(self.at.saturating_add(8), length)?;
        let name = self
            .blocks
            .strings
            .text(name.unwrap_or(usize::MAX), MAX_NAME)?;
        self.skip(length.saturating_add(8));
        properties.set(name, value)
    }

    /// Returns the first range of registers of the node that the walk has just returned.
    pub(crate) fn registers(&self, node: &RawNode<'a>) -> Result<PhysRange, FirmwareError> {
        let reg = node.properties.reg;
        let none = FirmwareErrorKind::Registers.at(node.offset);
        // The current node is the last level; its parent gives the cells.
        let mut level = self.depth.checked_sub(2).ok_or(none)?;
        let mut bus = *self.levels.get(level).ok_or(none)?;
        let address = number(&reg, 0, bus.address).or(Err(none))?.ok_or(none)?;
        let size = number(&reg, cells(bus.address), bus.size)
            .or(Err(none))?
            .ok_or(none)?;
        let mut first = address;
        // The root's addresses are the CPU's.
        while let Some(above) = level.checked_sub(1) {
            let parent = *self.levels.get(above).ok_or(none)?;
            first = translate(&bus, &parent, first, size)?.ok_or(none)?;
            (level, bus) = (above, parent);
        }
        PhysRange::new(PhysAddr::new(first), size).ok_or(none)
    }
}

impl<'a> Iterator for Walk<'a> {
    type Item = Result<RawNode<'a>, FirmwareError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == usize::MAX {
            return None;
        }
        let node = self.advance().transpose();
        if !matches!(node, Some(Ok(_))) {
            self.at = usize::MAX;
        }
        node
    }
}

impl FusedIterator for Walk<'_> {}

/// Bytes of `count` cells.
fn cells(count: u32) -> usize {
    usize::try_from(count)
        .unwrap_or(usize::MAX)
        .saturating_mul(4)
}

/// Reads a number of one or two cells. `None` for other sizes, such as the addresses of PCI.
fn number(bytes: &Bytes<'_>, at: usize, count: u32) -> Result<Option<u64>, FirmwareError> {
    let cell = |at| bytes.cell(at).map(u64::from);
    Ok(match count {
        1 => Some(cell(at)?),
        2 => Some(cell(at)? << 32 | cell(at.saturating_add(4))?),
        _ => None,
    })
}

/// Translates `size` bytes from `first` of a bus to the addresses of its parent, by the `ranges` of
/// the bus. `None` if no range contains them.
fn translate(
    bus: &Level<'_>,
    parent: &Level<'_>,
    first: u64,
    size: u64,
) -> Result<Option<u64>, FirmwareError> {
    let Some(ranges) = bus.ranges else {
        return Ok(None);
    };
    if ranges.is_empty() {
        return Ok(Some(first));
    }
    let (own, above) = (cells(bus.address), cells(parent.address));
    let entry = own.saturating_add(above).saturating_add(cells(bus.size));
    let mut at = 0_usize;
    for _ in 0..MAX_RANGES {
        if at >= ranges.len() {
            return Ok(None);
        }
        let base = number(&ranges, at, bus.address)?;
        let target = number(&ranges, at.saturating_add(own), parent.address)?;
        let length = number(
            &ranges,
            at.saturating_add(own.saturating_add(above)),
            bus.size,
        )?;
        let (Some(base), Some(target), Some(length)) = (base, target, length) else {
            return Ok(None);
        };
        let distance = first.checked_sub(base);
        let inside = distance.filter(|distance| {
            let end = distance.checked_add(size);
            end.is_some_and(|end| end <= length)
        });
        if let Some(distance) = inside {
            return Ok(target.checked_add(distance));
        }
        at = at.saturating_add(entry);
    }
    match at >= ranges.len() {
        true => Ok(None),
        false => Err(ranges.error(at, FirmwareErrorKind::TooManyEntries)),
    }
}
