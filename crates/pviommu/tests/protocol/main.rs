//! Tests of the wire format, the frontend with its cache, and the backend, with the modelled IOMMU.

#[path = "../rtc/cases.rs"]
mod cases;

mod attacks;
mod bounded;
mod caching;
mod failures;
mod guest;
mod hosts;
mod machine;
mod migration;
mod model;
mod overcommit;
mod replies;
mod rig;
mod side_by_side;
mod simulator;
mod steps;
mod tables;
mod vectors;
mod wire;
