//! Raw events to operations.
//!
//! [`window`] puts the lines of one call together, [`live_mappings`] finds an unmap's map,
//! [`scatter`] finds the segments of a list, [`physical`] brings addresses into the arena,
//! [`resolve`] applies the rules. The rules stand in `docs/TRACES.md`.

mod fifo;
mod live_mappings;
mod pairing;
mod physical;
mod resolve;
mod scatter;
mod window;

pub(crate) use pairing::Pairing;
pub use physical::ARENA_BYTES;
