//! What only ring modes need: how large a replay's rings are, and how one makes them.
//!
//! In a replay a ring is a (device, direction): ring number and direction are one ([`ring_of`]).
//! Decision 0012 says why.

mod parts;
mod ring_usage;
mod sizes;

pub use parts::RingParts;
pub use ring_usage::{RingUsage, count_ring_usage};
pub use sizes::RingSizes;

use ringfence_types::{Direction, RingId};

/// Rings of a device in a replay.
pub const RINGS: usize = Direction::ALL.len();

/// Which of a device's rings the buffers of a direction go to, by its place.
#[inline]
pub const fn ring_index(direction: Direction) -> usize {
    match direction {
        Direction::ToDevice => 0,
        Direction::FromDevice => 1,
        Direction::Bidirectional => 2,
    }
}

/// The same, by its number.
#[inline]
pub const fn ring_of(direction: Direction) -> RingId {
    RingId::new(ring_index(direction) as u16)
}
