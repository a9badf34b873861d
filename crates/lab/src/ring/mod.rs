//! Rings of ring modes: sizes and construction.

mod parts;
mod ring_usage;
mod sizes;

pub use parts::RingParts;
pub use ring_usage::{RingUsage, count_ring_usage};
pub use sizes::RingSizes;

pub use crate::layer::{RINGS, ring_index, ring_of};
