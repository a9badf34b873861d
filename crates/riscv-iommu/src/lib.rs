//! Driver of a RISC-V IOMMU.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]
