//! Page tables that Linux wrote: boots guests of three architectures, reads the tables of their
//! IOMMUs with this project's decoders, and compares them with the guests' own traces.

mod events;
mod guest;
mod monitor;
mod scalable;
mod tables;
mod trace;
mod units;

pub use guest::{Guest, LinuxMachine, Recordings};
pub use scalable::vtd_scalable;
pub use tables::{Domain, pages};
pub use trace::{Comparison, Live};
pub use units::{amd_vi, riscv_iommu, smmu_v3, vtd};
