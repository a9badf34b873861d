//! The driver against a model of a unit's registers.

mod caches;
mod coherency;
mod devices;
mod faults;
mod hostile;
mod invalidation;
mod model;
mod recovery;
mod start;
