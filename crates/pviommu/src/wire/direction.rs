//! Encoding of directions, with the values of Linux's `enum dma_data_direction`.

use ringfence_types::Direction;

/// Returns the wire value of `direction`.
#[inline]
pub(crate) const fn encode(direction: Direction) -> u32 {
    match direction {
        Direction::Bidirectional => 0,
        Direction::ToDevice => 1,
        Direction::FromDevice => 2,
    }
}

/// Decodes a direction; `None` if the value is reserved.
#[inline]
pub(crate) const fn decode(raw: u64) -> Option<Direction> {
    match raw {
        0 => Some(Direction::Bidirectional),
        1 => Some(Direction::ToDevice),
        2 => Some(Direction::FromDevice),
        _ => None,
    }
}
