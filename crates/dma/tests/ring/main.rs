//! Rings against hardware that caches as much as possible. The tests use no IOMMU model, because
//! the driver and the unit communicate only through memory.

mod bad_input;
mod lines;
mod model;
mod owned;
mod rig;
mod sizing;
