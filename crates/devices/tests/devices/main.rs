//! Drivers and devices over a real mapping layer and a real unit, every access judged against what
//! the driver has mapped.

mod as_published;
mod attacks;
mod board;
mod detached;
mod disks;
mod faults;
mod hostile;
mod judge;
mod matrix;
mod nics;
mod rig;
mod workloads;
