//! The ring unit against tables in memory, written by the hardware's format and by hand.

mod errata;
mod hostile;
mod invalidation;
mod machine;
mod prefetch;
mod reachable;
mod reference;
mod rig;
mod translate;
