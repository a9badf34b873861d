//! Converts raw events to operations.
//!
//! - [`window`] combines the lines of one call.
//! - [`live_mappings`] finds the map of an unmap.
//! - [`scatter`] computes the segments of a list.
//! - [`physical`] renames addresses into the arena.
//! - [`resolve`] applies the rules, which `docs/TRACES.md` lists.

mod fifo;
mod live_mappings;
mod pairing;
mod physical;
mod resolve;
mod scatter;
mod window;

pub(crate) use pairing::Pairing;
pub use physical::ARENA_BYTES;
