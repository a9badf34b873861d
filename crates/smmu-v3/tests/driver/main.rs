//! Tests of the driver against a model of the unit, on memory of an arena.

mod caches;
mod devices;
mod events;
mod golden;
mod guest;
mod hostile;
mod invalidations;
mod model;
mod queue;
mod ranges;
mod refusals;
mod rig;
mod start;
#[path = "../../../../tests/units/mod.rs"]
mod units;
