//! The ring unit against tables in memory, written through the format API and by hand.

mod errata;
mod hostile;
mod invalidation;
mod machine;
mod prefetch;
mod reachable;
mod reference;
mod rig;
mod translate;
