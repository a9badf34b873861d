//! Tests of the driver against a model of the unit, on memory of an arena.

mod devices;
mod events;
mod guest;
mod hostile;
mod invalidations;
mod model;
mod queue;
mod ranges;
mod rig;
mod start;
#[path = "../../../../tests/units/mod.rs"]
mod units;
