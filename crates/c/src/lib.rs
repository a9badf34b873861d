//! The C interface of Ringfence: IOVA allocators, I/O page tables, the mapping layer of one IOMMU
//! and the IOTLB of a vhost-user back-end.
//!
//! `include/ringfence.h` is generated from this crate, and its comments are those of the functions
//! here. `README.md` states the rules for pointers, threads and errors. Decision 0049 has the
//! reasons.
//!
//! A program in C calls the functions in this order; `examples/nic.c` drives a device with them:
//!
//! ```
//! use std::ptr::null_mut;
//!
//! use ringfence::*;
//!
//! let (mut space, mut cpu, mut first) = (null_mut(), null_mut(), 0);
//! // SAFETY: all pointers are to variables that live here, or to objects of the library.
//! unsafe {
//!     let kind = IovaKind::Magazines as u32;
//!     assert_eq!(ringfence_iova_create(kind, 1, 0xf_ffff, 0, &mut space), Status::Ok);
//!     assert_eq!(ringfence_iova_cpu_create(space, &mut cpu), Status::Ok);
//!
//!     // Four pages for a device with 32 address bits.
//!     assert_eq!(ringfence_iova_alloc(cpu, 4, 0, 0xf_ffff, &mut first), Status::Ok);
//!     assert_eq!(ringfence_iova_free(cpu, first, 4), Status::Ok);
//!     // A second free is an error, and changes nothing.
//!     assert_eq!(ringfence_iova_free(cpu, first, 4), Status::NotAllocated);
//!
//!     assert_eq!(ringfence_iova_cpu_destroy(&mut cpu), Status::Ok);
//!     assert_eq!(ringfence_iova_destroy(&mut space), Status::Ok);
//! }
//! assert!(space.is_null() && cpu.is_null());
//! ```
//!
//! # Safety of all functions
//!
//! A pointer is NULL, or points to a live object or structure of its type. A handle of an allocator
//! or a reader is used by one thread at a time. No other call uses an object during its destroy or
//! later. A structure with a field `size` has at least that field. A callback obeys the contract in
//! its structure.
#![deny(unsafe_op_in_unsafe_fn)]
// The contract of the pointers is the same for all functions: see above.
#![allow(clippy::missing_safety_doc)]

mod boundary;
mod copy;
mod dma;
mod iotlb;
mod iova;
mod layer;
mod memory;
mod ports;
mod slab;
mod status;
mod table;

pub use dma::*;
pub use iotlb::*;
pub use iova::*;
pub use memory::Memory;
pub use ports::{DmaPorts, InvalidationKind, InvalidationRequest};
pub use status::{Status, ringfence_status_text};
pub use table::*;

/// The version of the interface that this header describes: the major number in the upper 16 bits,
/// the minor number in the lower ones. A library with the same major number and at least this
/// minor number serves the program: it may have more functions and status codes. Structures with a
/// field `size` never change under one major number.
pub const RINGFENCE_ABI_VERSION: u32 = 0x0001_0000;

/// The device may read.
pub const RINGFENCE_READ: u32 = 1;
/// The device may write.
pub const RINGFENCE_WRITE: u32 = 2;

/// Returns the version of the library's interface.
#[unsafe(no_mangle)]
pub extern "C" fn ringfence_abi_version() -> u32 {
    RINGFENCE_ABI_VERSION
}

/// Programs move these objects between threads.
const fn sent<T: Send>() {}
/// Programs share these objects between threads.
const fn shared<T: Sync + Send>() {}
const _: () = {
    shared::<IovaSpace>();
    shared::<Table>();
    shared::<Dma>();
    shared::<Iotlb>();
    sent::<IovaCpu>();
    sent::<IotlbReader>();
};
