//! The para-virtual IOMMU of Tang et al., "IOMMU Para-Virtualization for Efficient and Secure DMA in
//! Virtual Machines" (the PVIOMMU paper), section 4.
//!
//! - [`wire`]: the messages, which `docs/PVIOMMU.md` defines.
//! - [`frontend`]: the guest's side, a table of the mapping layer that sends requests.
//! - [`backend`]: the host's side, which checks and executes requests.
//! - [`loopback`]: a queue to a backend in the same process, for replays and tests.
//! - [`rtc`]: the reverse translation cache, which `ringfence-dma` implements.
//!
//! Decision 0017 defines which part owns what.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod backend;
pub mod frontend;
pub mod loopback;
pub mod wire;

/// Reverse translation cache (PVIOMMU paper). `ringfence-dma` implements it.
pub use ringfence_dma::cache as rtc;
