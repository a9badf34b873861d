//! Drivers and devices on a real mapping layer and a real unit. A judge compares every access with
//! the driver's mappings.

mod as_published;
mod attachments;
mod attacks;
mod detached;
mod disks;
mod faults;
mod fewer_maps;
mod hardware;
mod hostile;
mod inline;
mod judge;
mod matrix;
mod nics;
mod recovery;
mod rig;
mod small_nic;
mod workloads;
