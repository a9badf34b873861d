//! Rings against hardware that caches all it can: no unit here, which the driver never meets but in
//! memory.

mod bad_input;
mod lines;
mod literal;
mod model;
mod owned;
mod rig;
mod sizing;
