//! The unit against tables in memory, written by the hardware's format and by hand.

mod contexts;
mod hostile;
mod invalidation;
mod reference;
mod rig;
mod translate;
mod walk_caches;
