//! The walking unit against tables in memory, written through the format API and by hand.

mod ats;
mod contexts;
mod dart;
#[allow(dead_code, unreachable_pub)]
#[path = "../fake/delayed.rs"]
mod delayed;
#[allow(dead_code, unreachable_pub)]
#[path = "../fake/failing.rs"]
mod failing;
mod gart;
mod host_bridges;
mod hostile;
mod invalidation;
mod large_entries;
mod nested;
mod prefetch;
mod reference;
mod rig;
mod translate;
mod walk_caches;
