//! Drivers and devices over a real mapping layer and a real unit, every access judged against what the driver has mapped.

mod attacks;
mod disks;
mod hostile;
mod nics;
mod rig;
mod workloads;
