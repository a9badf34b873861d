//! Errors of rings, and the back-pressure of a full ring.

use core::fmt;

use ringfence_pgtable::RingFormatError;
use ringfence_types::{RingId, RingSlot};

/// The reason why the tables of a device were not laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RingError {
    /// The table format cannot express a ring's size or the tables' address.
    Format(RingFormatError),
    /// The tables lie outside memory or are not aligned to 4 KiB.
    Memory,
    /// The memory for the tables is not zero, or the ring has had mappings.
    NotEmpty,
    /// The number of rings is zero or more than 2^16 - 1, the maximum of an rDEVICE's size field.
    Count {
        /// Number of rings requested.
        rings: usize,
    },
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(error) => error.fmt(f),
            Self::Memory => f.write_str("ring tables outside memory or misaligned"),
            Self::NotEmpty => f.write_str("ring tables are not empty"),
            Self::Count { rings } => {
                write!(f, "a device with {rings} rings; it takes 1 to {}", u16::MAX)
            }
        }
    }
}

impl core::error::Error for RingError {}

impl From<RingFormatError> for RingError {
    fn from(error: RingFormatError) -> Self {
        Self::Format(error)
    }
}

/// The slot that a map needs is in use. This is back-pressure, not an error ("it just means that
/// the driver should slow down", section 4). Nothing changed; the same map succeeds after the event
/// that `reason` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingFull {
    /// The full ring.
    pub ring: RingId,
    /// The first slot that blocks the map. For a map that takes any free slot, the first one of
    /// those that become free soonest. Never a free slot.
    pub slot: RingSlot,
    /// The event that frees the slot.
    pub reason: FullReason,
}

/// The event that a blocked map waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FullReason {
    /// The slot's mapping is live: the device must finish with it, and the driver must unmap it.
    Unmap,
    /// The slot is unmapped, and its burst has not ended.
    BurstEnd,
}

impl fmt::Display for RingFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ring, slot, .. } = self;
        match self.reason {
            FullReason::Unmap => write!(f, "ring {ring} is full: slot {slot} is mapped"),
            FullReason::BurstEnd => {
                write!(f, "ring {ring} is full: slot {slot} waits for its burst")
            }
        }
    }
}

/// The reason why a ring can never accept a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RingRefusal {
    /// An entry cannot express the buffer's length.
    Format(RingFormatError),
    /// The device has no such ring.
    NoSuchRing(RingId),
    /// The list has more pieces than the ring has slots.
    ListTooLong {
        /// Number of slots of the ring.
        slots: u32,
    },
    /// Addresses of this ring's slots lie beyond the device's DMA mask: bits 30 to 63 hold ring and
    /// slot.
    BeyondMask(RingId),
    /// The table lies outside the given memory.
    Memory,
}

impl fmt::Display for RingRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(error) => error.fmt(f),
            Self::NoSuchRing(ring) => write!(f, "the device has no ring {ring}"),
            Self::ListTooLong { slots } => {
                write!(f, "more pieces than the {slots} slots of the ring")
            }
            Self::BeyondMask(ring) => write!(f, "ring {ring} lies beyond the device's DMA mask"),
            Self::Memory => f.write_str("ring table outside memory"),
        }
    }
}
