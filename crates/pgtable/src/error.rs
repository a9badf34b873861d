//! Errors of table operations. An error leaves the table unchanged unless the caller broke the
//! concurrency contract of [`Table`](crate::Table).

use core::fmt;

use ringfence_types::{Iova, PhysAddr};

/// Error of an operation on a whole table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TableError {
    /// The frame source has no free frame.
    OutOfFrames,
    /// A table lies outside the given memory, or the frame source returned a frame outside it.
    Memory,
    /// The root of this format is larger than a frame. Use [`Table::at`](crate::Table::at) with
    /// memory of your own.
    RootTooLarge,
    /// The frames of the source do not have the size of the granule of this format.
    FrameSize,
    /// The memory given for the root is not all zero.
    RootNotEmpty,
    /// The entries of the format are narrower than a word. Use the format's own table.
    NarrowEntries,
}

/// Error of a map. The table is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MapError {
    /// The request has zero pages.
    Empty,
    /// An address is not a multiple of 4 KiB.
    Misaligned,
    /// The range exceeds the address width of the table.
    BeyondWidth {
        /// First address of the range.
        iova: Iova,
    },
    /// The physical range exceeds the address bits of an entry.
    PhysicalBeyondWidth {
        /// First address of the range.
        at: PhysAddr,
    },
    /// A page of the range is already mapped.
    AlreadyMapped {
        /// First mapped page of the range.
        iova: Iova,
    },
    /// The format has no access control bits, and the request does not allow both accesses.
    Restricted,
    /// The frame source has no free frame for a table page, or none of the size of the granule.
    OutOfFrames,
    /// A table on the path lies outside memory, or an entry on it has a value that this format
    /// never writes.
    Corrupt {
        /// The page whose path is corrupt.
        iova: Iova,
    },
    /// A hypervisor, a host or a device keeps the table. It refused the request for another reason,
    /// or did not answer.
    Refused {
        /// First address of the range.
        iova: Iova,
    },
}

/// Error of an unmap. The table is unchanged, unless another CPU changed entries of the range
/// during the unmap, against the contract of [`Table`](crate::Table). Then some pages of the range
/// may be cleared, and written back as after a successful unmap. The caller cannot tell the cases
/// apart. If the contract may be broken, it must invalidate the range before it reuses the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnmapError {
    /// A page of the range is not mapped.
    NotMapped {
        /// First unmapped page of the range.
        iova: Iova,
    },
    /// The range exceeds the address width of the table.
    BeyondWidth {
        /// First address of the range.
        iova: Iova,
    },
    /// The range covers part of a larger page. Unmap never splits a page.
    WouldSplit {
        /// First address of the larger page.
        iova: Iova,
    },
    /// A table on the path lies outside memory, or an entry on it has a value that this format
    /// never writes.
    Corrupt {
        /// The page whose path is corrupt.
        iova: Iova,
    },
    /// A hypervisor, a host or a device keeps the table. It refused the request for another reason,
    /// or did not answer.
    Refused {
        /// First address of the range.
        iova: Iova,
    },
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutOfFrames => "out of frames for tables",
            Self::Memory => "the table lies outside memory",
            Self::RootTooLarge => "the root of this format needs contiguous frames",
            Self::FrameSize => "the frames of the source do not have the granule of this format",
            Self::RootNotEmpty => "the root table has present entries",
            Self::NarrowEntries => "entries of this format are narrower than a word",
        })
    }
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the range is empty"),
            Self::Misaligned => {
                f.write_str("an address or the length is not aligned to the granule")
            }
            Self::BeyondWidth { iova } => {
                write!(f, "the range at {iova} extends beyond the table's width")
            }
            Self::PhysicalBeyondWidth { at } => {
                write!(
                    f,
                    "the physical range at {at} extends beyond the width of an entry"
                )
            }
            Self::AlreadyMapped { iova } => write!(f, "{iova} is already mapped"),
            Self::Restricted => f.write_str("entries of this format cannot restrict accesses"),
            Self::OutOfFrames => f.write_str("out of frames for tables"),
            Self::Corrupt { iova } => write!(f, "the table on the path to {iova} is corrupt"),
            Self::Refused { iova } => {
                write!(f, "the owner of the table refused the map of {iova}")
            }
        }
    }
}

impl fmt::Display for UnmapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMapped { iova } => write!(f, "{iova} is not mapped"),
            Self::BeyondWidth { iova } => {
                write!(f, "the range at {iova} extends beyond the table's width")
            }
            Self::WouldSplit { iova } => write!(
                f,
                "the range covers only a part of the large page at {iova}"
            ),
            Self::Corrupt { iova } => write!(f, "the table on the path to {iova} is corrupt"),
            Self::Refused { iova } => {
                write!(f, "the owner of the table refused the unmap of {iova}")
            }
        }
    }
}

impl core::error::Error for TableError {}
impl core::error::Error for MapError {}
impl core::error::Error for UnmapError {}
