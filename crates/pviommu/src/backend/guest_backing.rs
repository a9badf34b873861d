//! The interface to the memory behind a guest.

use core::fmt;

use ringfence_types::PhysAddr;

use crate::wire::Gpa;

/// Host frames behind GPAs.
///
/// A page that a device can access is pinned: its frame neither moves nor goes away.
/// Pins are counted, because several GIOVAs may map one GPA.
pub trait GuestBacking {
    /// Returns true if the page at `page`, a multiple of 4096, belongs to the guest's memory.
    fn contains(&self, page: Gpa) -> bool;

    /// Pins the page and returns its frame. The frame stays until every pin has its
    /// [`unpin`](Self::unpin). Allocates a frame if the page has none.
    ///
    /// # Errors
    /// The number of pins is unchanged.
    fn pin(&mut self, page: Gpa) -> Result<PhysAddr, PinError>;

    /// Removes a pin of a pinned page.
    fn unpin(&mut self, page: Gpa);

    /// Does work that can wait until after an answer. Called after an answer.
    fn maintain(&mut self) {}
}

/// Reason why a page cannot be pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PinError {
    /// The page is outside the guest's memory.
    NotMemory,
    /// No frame is left for the page or a table, or the page's pin count is at its maximum.
    NoRoom,
    /// The second stage is corrupt.
    Corrupt,
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotMemory => "the address is not guest memory",
            Self::NoRoom => "out of frames",
            Self::Corrupt => "the second stage is corrupt",
        })
    }
}

impl core::error::Error for PinError {}
