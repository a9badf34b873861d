//! The function as its driver and the devices behind it see it.

mod blocked;
mod faults;
mod hostile;
mod registers;
mod rig;
mod rings;
mod vectors;
