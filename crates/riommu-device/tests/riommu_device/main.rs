//! The function as its driver and the devices behind it see it.

#[path = "../common/mod.rs"]
mod common;

mod blocked;
mod faults;
mod hostile;
mod reference;
mod registers;
mod rig;
mod rings;
mod vectors;
