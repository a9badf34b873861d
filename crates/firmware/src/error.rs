//! The error of all parsers: the reason and its offset.

use core::error::Error;
use core::fmt;

/// A firmware table is malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirmwareError {
    /// Offset in bytes from the start of the table.
    pub offset: usize,
    /// Reason of the refusal.
    pub kind: FirmwareErrorKind,
}

/// Reasons to refuse a firmware table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FirmwareErrorKind {
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
    /// References reach no target within [`MAX_HOPS`](crate::MAX_HOPS) structures.
    TooManyHops,
    /// A text has no terminating zero byte, or a property name is longer than 255 bytes.
    Unterminated,
    /// An unknown token, a property after a child node, or nodes that do not match.
    Token,
    /// Nodes are nested deeper than [`MAX_DEPTH`](crate::MAX_DEPTH).
    TooDeep,
    /// A property of a device tree has a size or value that its binding does not permit.
    Property,
    /// A list has more entries than the parser reads: 16 of `iommus`, 64 of `ranges`.
    TooManyEntries,
    /// The `reg` of an IOMMU has no address that a CPU can use, or no PCI address.
    Registers,
}

impl FirmwareErrorKind {
    pub(crate) fn at(self, offset: usize) -> FirmwareError {
        FirmwareError { offset, kind: self }
    }
}

impl fmt::Display for FirmwareErrorKind {
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
            Self::TooManyHops => "the references reach no target within 8 structures",
            Self::Unterminated => "the text has no zero byte within its bounds",
            Self::Token => "the token is not permitted here",
            Self::TooDeep => "the nodes are nested deeper than 32 levels",
            Self::Property => "the property does not follow its binding",
            Self::TooManyEntries => "the list has more entries than the parser reads",
            Self::Registers => "the `reg` of the IOMMU has no usable address",
        })
    }
}

impl fmt::Display for FirmwareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "offset {:#x}: {}", self.offset, self.kind)
    }
}

impl Error for FirmwareError {}

#[cfg(test)]
mod tests {
    extern crate alloc;

    use alloc::format;
    use alloc::string::ToString;

    use super::*;
    use crate::{MAX_DEPTH, MAX_HOPS};

    #[test]
    fn each_kind_has_its_text() {
        use FirmwareErrorKind::*;
        let target = format!("the references reach no target within {MAX_HOPS} structures");
        let depth = format!("the nodes are nested deeper than {MAX_DEPTH} levels");
        let texts = [
            (Truncated, "it ends past its container"),
            (Signature, "the signature is another table's"),
            (TableLength, "the table is shorter than its header"),
            (Checksum, "the checksum is wrong"),
            (Revision, "the revision is not supported"),
            (
                StructureLength,
                "the length does not fit the structure's type",
            ),
            (DevicePath, "the PCI device or function number is too large"),
            (Range, "the range is empty or passes the largest value"),
            (RangeWithoutEnd, "the range of devices has no end entry"),
            (EndWithoutStart, "the end entry has no start entry"),
            (Reference, "the reference leads to no suitable structure"),
            (TooManyHops, target.as_str()),
            (Unterminated, "the text has no zero byte within its bounds"),
            (Token, "the token is not permitted here"),
            (TooDeep, depth.as_str()),
            (Property, "the property does not follow its binding"),
            (
                TooManyEntries,
                "the list has more entries than the parser reads",
            ),
            (Registers, "the `reg` of the IOMMU has no usable address"),
        ];
        for (kind, text) in texts {
            assert_eq!(kind.at(0x30).to_string(), format!("offset 0x30: {text}"));
        }
    }
}
