//! What can go wrong with a table. Every error leaves the table as it was before the call.

use core::fmt;

use ringfence_types::{Iova, PhysAddr};

/// Why a table could not be set up or changed as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TableError {
    /// No frame is left.
    OutOfFrames,
    /// A table lies outside the memory given, or a frame source hands out frames that do.
    Memory,
    /// The root of this format is larger than a frame: it must be given to
    /// [`Table::at`](crate::Table::at).
    RootTooLarge,
    /// The root given is not empty.
    RootNotEmpty,
}

/// Why a range was not mapped. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MapError {
    /// There are no pages to map.
    Empty,
    /// An address is not a multiple of 4 KiB.
    Misaligned,
    /// The range has addresses above the width of the table.
    BeyondWidth {
        /// First address of the range.
        iova: Iova,
    },
    /// The physical range has addresses that an entry cannot hold.
    PhysicalBeyondWidth {
        /// First address of the range.
        at: PhysAddr,
    },
    /// This page is mapped already.
    AlreadyMapped {
        /// The first such page of the range.
        iova: Iova,
    },
    /// No frame is left for a table.
    OutOfFrames,
    /// A table on the path to this page lies outside memory or holds what this format never writes.
    Corrupt {
        /// The page.
        iova: Iova,
    },
}

/// Why a range was not unmapped. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnmapError {
    /// This page is not mapped.
    NotMapped {
        /// The first such page of the range.
        iova: Iova,
    },
    /// The range has addresses above the width of the table.
    BeyondWidth {
        /// First address of the range.
        iova: Iova,
    },
    /// The range covers a part of a larger page: it is unmapped as a whole or not at all.
    WouldSplit {
        /// First address of the larger page.
        iova: Iova,
    },
    /// A table on the path to this page lies outside memory or holds what this format never writes.
    Corrupt {
        /// The page.
        iova: Iova,
    },
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutOfFrames => "no frame left for a table",
            Self::Memory => "table outside memory",
            Self::RootTooLarge => "the root of this format needs contiguous frames",
            Self::RootNotEmpty => "the root given is not empty",
        })
    }
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("nothing to map"),
            Self::Misaligned => f.write_str("address is not page-aligned"),
            Self::BeyondWidth { iova } => write!(f, "range at {iova} exceeds the table's width"),
            Self::PhysicalBeyondWidth { at } => {
                write!(f, "physical range at {at} exceeds what an entry holds")
            }
            Self::AlreadyMapped { iova } => write!(f, "{iova} is mapped already"),
            Self::OutOfFrames => f.write_str("no frame left for a table"),
            Self::Corrupt { iova } => write!(f, "the table on the path to {iova} is corrupt"),
        }
    }
}

impl fmt::Display for UnmapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMapped { iova } => write!(f, "{iova} is not mapped"),
            Self::BeyondWidth { iova } => write!(f, "range at {iova} exceeds the table's width"),
            Self::WouldSplit { iova } => write!(f, "range covers a part of the page at {iova}"),
            Self::Corrupt { iova } => write!(f, "the table on the path to {iova} is corrupt"),
        }
    }
}

impl core::error::Error for TableError {}
impl core::error::Error for MapError {}
impl core::error::Error for UnmapError {}
