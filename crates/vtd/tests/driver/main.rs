//! The driver against a model of a unit's registers.

mod coherency;
mod devices;
mod faults;
mod invalidation;
mod model;
mod start;
