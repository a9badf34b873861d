//! IOVA allocators, one a file, behind one role.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod role;

pub use role::{AllocError, Allocation, IovaAllocator, Request, Returned};
