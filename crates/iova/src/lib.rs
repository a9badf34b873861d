//! IOVA allocators, one a file, behind one role.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod cached_rbtree;
mod rbtree;
mod role;
mod store;

pub use cached_rbtree::{CachedRbTree, CachedTree, SeedError};
pub use role::{AllocError, Allocation, IovaAllocator, Request, Returned};
pub use store::{Locked, RangeStore, Reusable};
