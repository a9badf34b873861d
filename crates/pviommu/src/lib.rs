//! The para-virtual IOMMU (PVIOMMU paper: Tang et al., section 4): the guest's frontend, its
//! reverse translation cache, and the host's backend. Decision 0017 defines which part owns what;
//! `docs/PVIOMMU.md` defines the wire format.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod backend;
pub mod frontend;
pub mod loopback;
pub mod wire;

pub use ringfence_dma::cache as rtc;
