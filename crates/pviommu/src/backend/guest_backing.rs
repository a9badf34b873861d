//! The role of what stands behind a guest's memory.

use core::fmt;

use ringfence_types::PhysAddr;

use crate::wire::Gpa;

/// Host frames behind GPAs.
///
/// A page that a device reaches is pinned: its frame neither moves nor goes away (attack A32). Pins
/// are counted, for several GIOVAs may lead to one GPA.
pub trait GuestBacking {
    /// Whether the page at `page`, a multiple of 4096, is memory of this machine.
    fn contains(&self, page: Gpa) -> bool;

    /// The frame behind the page, which stays until as many [`unpin`](Self::unpin) as there were
    /// pins. A page that has no frame yet gets one.
    ///
    /// # Errors
    /// The page is pinned as often as before.
    fn pin(&mut self, page: Gpa) -> Result<PhysAddr, PinError>;

    /// Takes back one pin of a page that has one.
    fn unpin(&mut self, page: Gpa);

    /// Work that need not delay an answer. To be called when one has been given.
    fn maintain(&mut self) {}
}

/// Why a page has no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PinError {
    /// The page is no memory of this machine.
    NotMemory,
    /// No frame is left, none for a table, or the page is pinned too often.
    NoRoom,
    /// The second stage is not as it was written.
    Corrupt,
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotMemory => "no memory of this machine",
            Self::NoRoom => "no frame left",
            Self::Corrupt => "the second stage is corrupt",
        })
    }
}

impl core::error::Error for PinError {}
