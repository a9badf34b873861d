//! The wire format and the backend, on a machine whose IOMMU is the modelled one.

mod answers;
mod attacks;
mod failures;
mod guest;
mod migration;
mod model;
mod overcommit;
mod rig;
mod simulator;
mod tables;
mod vectors;
mod wire;
