//! Rings of ring modes: sizes and construction.
//!
//! In a replay, each (device, direction) has one ring, so the direction determines the ring number
//! ([`ring_of`]). Decision 0012 gives the reason.

mod parts;
mod ring_usage;
mod sizes;

pub use parts::RingParts;
pub use ring_usage::{RingUsage, count_ring_usage};
pub use sizes::RingSizes;

use ringfence_types::{Direction, RingId};

/// Number of rings of a device in a replay.
pub const RINGS: usize = Direction::ALL.len();

/// Returns the index of the ring for the buffers of a direction, among a device's rings.
#[inline]
pub const fn ring_index(direction: Direction) -> usize {
    match direction {
        Direction::ToDevice => 0,
        Direction::FromDevice => 1,
        Direction::Bidirectional => 2,
    }
}

/// Returns the ring ID for the buffers of a direction.
#[inline]
pub const fn ring_of(direction: Direction) -> RingId {
    RingId::new(ring_index(direction) as u16)
}
