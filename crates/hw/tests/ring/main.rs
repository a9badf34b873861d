//! The ring unit against tables in memory, written through the format API and by hand.

#[allow(dead_code, unreachable_pub)]
#[path = "../fake/delayed.rs"]
mod delayed;
mod errata;
mod hostile;
mod invalidation;
mod machine;
mod prefetch;
mod reachable;
mod reference;
mod rig;
// The files of `ringfence-papers` are compiled here: with a dependency on it, these tests would
// depend on `dma`.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../papers/src/ring_entry.rs"]
mod ring_entry;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../papers/src/ring_logic.rs"]
mod ring_logic;
mod translate;
