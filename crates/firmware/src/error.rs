//! The error of all parsers: the reason and its offset.

use core::error::Error;
use core::fmt;

/// A firmware table is malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableError {
    /// Offset in bytes from the start of the table.
    pub offset: usize,
    /// Reason of the refusal.
    pub kind: TableErrorKind,
}

/// Reasons to refuse a firmware table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableErrorKind {
    /// A field, structure or array ends past its container.
    Truncated,
    /// The signature or magic number is another table's.
    Signature,
    /// The table's own length is shorter than its header.
    TableLength,
    /// The bytes of an ACPI table do not sum up to 0.
    Checksum,
    /// The parser does not support the table's revision.
    Revision,
    /// A structure is shorter than its type requires, or its length is not possible.
    StructureLength,
    /// A PCI device number above 31 or a function number above 7.
    DevicePath,
    /// The last address or identifier of a range is below the first, or past the largest one.
    Range,
    /// A range of devices has a start entry without an end entry.
    RangeWithoutEnd,
    /// A range of devices has an end entry without a start entry.
    EndWithoutStart,
    /// A reference to a structure that does not exist, or of a type that is not permitted there.
    Reference,
    /// References lead on after [`MAX_HOPS`](crate::MAX_HOPS) structures.
    TooManyHops,
    /// A text has no terminating zero byte, or a property name is longer than 255 bytes.
    Unterminated,
    /// An unknown token, a property after a child node, or nodes that do not match.
    Token,
    /// Nodes are nested deeper than [`MAX_DEPTH`](crate::MAX_DEPTH).
    TooDeep,
    /// A property of a device tree has a size or value that its binding does not permit.
    Property,
    /// The `reg` of an IOMMU has no address that a CPU can use.
    Registers,
}

impl TableErrorKind {
    pub(crate) fn at(self, offset: usize) -> TableError {
        TableError { offset, kind: self }
    }
}

impl fmt::Display for TableErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Truncated => "it ends past its container",
            Self::Signature => "the signature is another table's",
            Self::TableLength => "the table is shorter than its header",
            Self::Checksum => "the checksum is wrong",
            Self::Revision => "the revision is not supported",
            Self::StructureLength => "the length does not fit the structure's type",
            Self::DevicePath => "the PCI device or function number is too large",
            Self::Range => "the range is empty or passes the largest value",
            Self::RangeWithoutEnd => "the range of devices has no end entry",
            Self::EndWithoutStart => "the end entry has no start entry",
            Self::Reference => "the reference leads to no suitable structure",
            Self::TooManyHops => "the references have no end",
            Self::Unterminated => "the text has no end",
            Self::Token => "the token is not permitted here",
            Self::TooDeep => "the nodes are nested too deep",
            Self::Property => "the property does not follow its binding",
            Self::Registers => "the registers have no physical address",
        })
    }
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "offset {:#x}: {}", self.offset, self.kind)
    }
}

impl Error for TableError {}
