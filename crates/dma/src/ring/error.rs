//! Errors of rings, and the one refusal that is none: a full ring.

use core::fmt;

use ringfence_pgtable::RingFormatError;
use ringfence_types::{RingId, RingSlot};

/// Why the tables of a device were not laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RingError {
    /// A ring's size or the tables' place cannot be expressed.
    Format(RingFormatError),
    /// The tables lie outside memory, or are not aligned to 4 KiB.
    Memory,
    /// The memory for the tables is not zero, or the ring has had mappings.
    NotEmpty,
    /// No rings, or more than 2^16 - 1, which is what an rDEVICE's size can say.
    Count {
        /// How many were asked for.
        rings: usize,
    },
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(error) => error.fmt(f),
            Self::Memory => f.write_str("ring tables outside memory or misaligned"),
            Self::NotEmpty => f.write_str("ring tables that are not empty"),
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

/// The slot that a map would have to take is not free: legal back-pressure ("it just means that the
/// driver should slow down", section 4). Nothing was changed; the same map succeeds once what it
/// waits for has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingFull {
    /// The ring.
    pub ring: RingId,
    /// The first slot in the way; for a map that takes any free slot, the first of those that free
    /// up soonest. Never a free one.
    pub slot: RingSlot,
    /// What frees it.
    pub reason: FullReason,
}

/// What a stalled map waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FullReason {
    /// The slot's mapping is live: the device has to finish with it, and its driver to unmap it.
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

/// Why a ring cannot take a buffer, now or later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RingRefusal {
    /// The buffer is longer than an entry can say.
    Format(RingFormatError),
    /// The device has no such ring.
    NoSuchRing(RingId),
    /// The list has more pieces than the ring has slots.
    ListTooLong {
        /// The slots of the ring.
        slots: u32,
    },
    /// Addresses of this ring's slot lie beyond the device's DMA mask: ring and slot are in bits 30
    /// to 63.
    BeyondMask(RingId),
    /// The table lies outside the memory given.
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
