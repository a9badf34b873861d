//! The para-virtual IOMMU of Tang et al., "IOMMU Para-Virtualization for Efficient and Secure DMA
//! in Virtual Machines" (the PVIOMMU paper), section 4.
//!
//! - [`wire`]: the messages, which `docs/PVIOMMU.md` defines.
//! - [`frontend`]: the guest's side, a table of the mapping layer that sends requests.
//! - [`backend`]: the host's side, which checks and executes requests.
//! - [`loopback`]: a queue to a backend in the same process, for replays and tests.
//! - [`rtc`]: the reverse translation cache, which `ringfence-dma` implements.
//!
//! Decision 0017 defines which part owns what.
//!
//! A guest maps a page for a device to read, and the host decodes the request:
//!
//! ```
//! use ringfence_pviommu::wire::{Devid, Gpa, Request, encode_map};
//! use ringfence_types::{Direction, Iova};
//!
//! let device = Devid::new(0x10);
//! let page = (Iova::new(0x10_0000), Gpa::new(0x7000));
//! let mut message = Vec::new();
//! encode_map(&mut message, device, Direction::ToDevice, [page].into_iter())?;
//!
//! // The device permits 64 pages in a request.
//! let Request::Map(map) = Request::decode(&message, 64)? else {
//!     panic!("the guest sent a map");
//! };
//! assert_eq!((map.device, map.direction), (device, Direction::ToDevice));
//! assert_eq!(map.pairs().collect::<Vec<_>>(), [page]);
//! # Ok::<(), ringfence_pviommu::wire::Malformed>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod backend;
pub mod frontend;
pub mod loopback;
pub mod wire;

/// Reverse translation cache (PVIOMMU paper). `ringfence-dma` implements it.
pub use ringfence_dma::cache as rtc;
