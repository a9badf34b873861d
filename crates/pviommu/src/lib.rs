//! The para-virtual IOMMU (Tang et al., section 4): a guest's frontend, the reverse translation
//! cache in front of it, and the host's backend. Decision 0017 says who owns what;
//! `docs/PVIOMMU.md` is the wire format.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod backend;
pub mod frontend;
pub mod loopback;
pub mod rtc;
pub mod wire;
