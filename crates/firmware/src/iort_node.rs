//! Nodes of IORT (Arm DEN 0049E).

use ringfence_types::{IovaRange, PhysAddr};

use crate::bytes::Bytes;
use crate::error::FirmwareError;
use crate::id_mapping::{IdMapping, Mappings};
use crate::reserved;

/// The mapping has one output ID for all input IDs.
const SINGLE_MAPPING: u32 = 1;

/// First revision of the table with today's layout of RMR nodes (issue E.d).
const RMR_REVISION: u8 = 5;

/// Length of a memory range descriptor of an RMR node.
const RANGE_BYTES: usize = 20;

/// A node of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IortNode<'a> {
    /// Revision of the node's type.
    pub revision: u8,
    /// Unique number of the node; 0 in old tables.
    pub identifier: u32,
    /// Content, by type.
    pub kind: IortNodeKind<'a>,
    offset: usize,
    mappings: Mappings<'a>,
}

/// Content of a node, by type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IortNodeKind<'a> {
    /// Interrupt translation services.
    ItsGroup(ItsGroup<'a>),
    /// A device of the ACPI namespace.
    NamedComponent {
        /// Flags: stall supported (bit 0), width of its PASIDs (bits 5:1).
        flags: u32,
        /// Memory access properties (table "Memory access properties").
        memory_properties: u64,
        /// Width of its addresses in bits.
        address_limit: u8,
        /// Path of the object in the namespace, without a terminating zero.
        name: &'a [u8],
    },
    /// A PCI root complex.
    RootComplex(RootComplex),
    /// An SMMU of version 1 or 2.
    Smmu {
        /// Address of the registers.
        registers: PhysAddr,
        /// Length of the registers in bytes.
        span: u64,
        /// Model, such as 0 for version 1 and 1 for version 2.
        model: u32,
        /// Flags: DVM supported (bit 0), coherent walk (bit 1).
        flags: u32,
    },
    /// An SMMU of version 3.
    SmmuV3(SmmuV3),
    /// A performance monitor.
    Pmcg {
        /// Addresses of its pages 0 and 1.
        pages: [PhysAddr; 2],
        /// Overflow interrupt; 0 if it has none.
        overflow_gsiv: u32,
        /// Offset of the monitored node in the table.
        reference: u32,
    },
    /// Reserved memory of the streams that its ID mappings name.
    Rmr(Rmr<'a>),
    /// A type that this crate does not know, or RMR in a table before issue E.d.
    Other(u8),
}

/// Interrupt translation services that share device IDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ItsGroup<'a>(Bytes<'a>);

impl<'a> ItsGroup<'a> {
    /// Returns the identifiers of the services, as in MADT.
    pub fn identifiers(&self) -> impl Iterator<Item = u32> + use<'a> {
        let chunks = self.0.data().as_chunks::<4>().0;
        chunks.iter().map(|bytes| u32::from_le_bytes(*bytes))
    }
}

/// A PCI root complex.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootComplex {
    /// PCI segment of the root complex.
    pub segment: u32,
    /// Memory access properties (table "Memory access properties").
    pub memory_properties: u64,
    /// ATS (bit 0), page requests (bit 1) and PASIDs (bit 2) supported.
    pub ats: u32,
    /// Width of its addresses in bits; `None` in old tables.
    pub address_limit: Option<u8>,
}

/// An SMMU of version 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmmuV3 {
    /// Address of the registers.
    pub registers: PhysAddr,
    /// Flags: COHACC override (bit 0), HTTU override (bits 2:1), proximity domain valid (bit 3),
    /// device ID mapping valid (bit 4).
    pub flags: u32,
    /// Address of the VATOS page, or 0.
    pub vatos: PhysAddr,
    /// Model; 0 is generic.
    pub model: u32,
    /// Wired interrupts: events, page requests, global errors, command completion; 0 if a message
    /// replaces one.
    pub gsivs: [u32; 4],
    /// Proximity domain, if firmware gives one.
    pub proximity_domain: Option<u32>,
}

/// Reserved memory ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rmr<'a> {
    /// Flags: remap permitted (bit 0), privileged (bit 1), access attributes (bits 9:2).
    pub flags: u32,
    ranges: Bytes<'a>,
}

impl<'a> Rmr<'a> {
    /// Returns true if the operating system may move the memory.
    pub fn remap_permitted(&self) -> bool {
        self.flags & 1 != 0
    }

    fn checked(&self) -> impl Iterator<Item = Result<IovaRange, FirmwareError>> + use<'a> {
        let ranges = self.ranges;
        (0..ranges.len() / RANGE_BYTES).map(move |index| {
            let range = ranges.part(index.saturating_mul(RANGE_BYTES), RANGE_BYTES)?;
            reserved::range_of(range.u64(0)?, range.u64(8)?, range.offset())
        })
    }

    /// Returns the ranges: I/O virtual and physical addresses.
    pub fn ranges(&self) -> impl Iterator<Item = IovaRange> + use<'a> {
        self.checked().flatten()
    }
}

impl<'a> IortNode<'a> {
    /// Reads a node of a table with the revision `revision` and `end` bytes.
    pub(crate) fn parse(
        bytes: &Bytes<'a>,
        end: usize,
        revision: u8,
    ) -> Result<Self, FirmwareError> {
        let kind = match bytes.u8(0)? {
            0 => Self::its_group(bytes)?,
            1 => {
                bytes.at_least(30)?;
                IortNodeKind::NamedComponent {
                    flags: bytes.u32(16)?,
                    memory_properties: bytes.u64(20)?,
                    address_limit: bytes.u8(28)?,
                    name: bytes.text(29, bytes.len())?,
                }
            }
            2 => {
                bytes.at_least(32)?;
                IortNodeKind::RootComplex(RootComplex {
                    segment: bytes.u32(28)?,
                    memory_properties: bytes.u64(16)?,
                    ats: bytes.u32(24)?,
                    address_limit: match bytes.u8(3)? {
                        0 => None,
                        _ => Some(bytes.u8(32)?),
                    },
                })
            }
            3 => {
                bytes.at_least(60)?;
                IortNodeKind::Smmu {
                    registers: PhysAddr::new(bytes.u64(16)?),
                    span: bytes.u64(24)?,
                    model: bytes.u32(32)?,
                    flags: bytes.u32(36)?,
                }
            }
            4 => IortNodeKind::SmmuV3(Self::smmu_v3(bytes)?),
            5 => {
                bytes.at_least(40)?;
                IortNodeKind::Pmcg {
                    pages: [bytes.u64(16)?, bytes.u64(32)?].map(PhysAddr::new),
                    overflow_gsiv: bytes.u32(24)?,
                    reference: bytes.u32(28)?,
                }
            }
            6 if revision >= RMR_REVISION => IortNodeKind::Rmr(Self::rmr(bytes)?),
            other => IortNodeKind::Other(other),
        };
        let [count, at] = [bytes.u32(8)?, bytes.u32(12)?];
        Ok(Self {
            revision: bytes.u8(3)?,
            identifier: bytes.u32(4)?,
            kind,
            offset: bytes.offset(),
            mappings: Mappings::parse(bytes, at.into(), count.into(), 1, end)?,
        })
    }

    fn its_group(bytes: &Bytes<'a>) -> Result<IortNodeKind<'a>, FirmwareError> {
        bytes.at_least(20)?;
        let count = usize::try_from(bytes.u32(16)?).unwrap_or(usize::MAX);
        let identifiers = bytes.part(20, count.saturating_mul(4))?;
        Ok(IortNodeKind::ItsGroup(ItsGroup(identifiers)))
    }

    fn smmu_v3(bytes: &Bytes<'a>) -> Result<SmmuV3, FirmwareError> {
        bytes.at_least(60)?;
        let flags = bytes.u32(24)?;
        Ok(SmmuV3 {
            registers: PhysAddr::new(bytes.u64(16)?),
            flags,
            vatos: PhysAddr::new(bytes.u64(32)?),
            model: bytes.u32(40)?,
            gsivs: [
                bytes.u32(44)?,
                bytes.u32(48)?,
                bytes.u32(52)?,
                bytes.u32(56)?,
            ],
            proximity_domain: match flags & 8 {
                0 => None,
                _ => Some(bytes.u32(60)?),
            },
        })
    }

    fn rmr(bytes: &Bytes<'a>) -> Result<Rmr<'a>, FirmwareError> {
        bytes.at_least(28)?;
        let [count, at] = [bytes.u32(20)?, bytes.u32(24)?];
        let [count, at] = [count, at].map(|field| usize::try_from(field).unwrap_or(usize::MAX));
        let rmr = Rmr {
            flags: bytes.u32(16)?,
            ranges: bytes.part(at, count.saturating_mul(RANGE_BYTES))?,
        };
        rmr.checked().try_for_each(|range| range.map(|_| ()))?;
        Ok(rmr)
    }

    /// Returns the ID mappings.
    pub fn mappings(&self) -> impl Iterator<Item = IdMapping> + use<'a> {
        self.mappings.iter()
    }

    /// Returns true if the node is an SMMU.
    pub fn is_unit(&self) -> bool {
        matches!(
            self.kind,
            IortNodeKind::Smmu { .. } | IortNodeKind::SmmuV3(_)
        )
    }

    /// Returns the offset of the node in the table, which references name.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the output ID of `input`, with its mapping. A single mapping of a root complex or
    /// named component gives all inputs one output. A single mapping of an SMMU or performance
    /// monitor is for its own interrupts and does not count.
    pub(crate) fn output(&self, input: u32) -> Option<(u32, IdMapping)> {
        let of_devices = matches!(
            self.kind,
            IortNodeKind::NamedComponent { .. } | IortNodeKind::RootComplex(_)
        );
        self.mappings().find_map(|mapping| {
            if mapping.flags & SINGLE_MAPPING == 0 {
                return Some((mapping.map(input)?, mapping));
            }
            of_devices.then_some((mapping.output, mapping))
        })
    }
}
