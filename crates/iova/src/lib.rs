//! IOVA allocators, one a file, behind one role.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod bitmap;
mod cached_rbtree;
mod eiovar;
mod free_space;
mod freebsd;
mod identity;
mod linux_rcache;
mod live;
pub mod magazine;
mod rbtree;
mod role;
mod store;
mod table_bitmap;

pub use bitmap::{Bitmap, BitmapCpu, BitmapState};
pub use cached_rbtree::{CachedRbTree, CachedTree, SeedError};
pub use eiovar::{Capacity, Eiovar, LockedEiovar};
pub use free_space::FreeSpace;
pub use freebsd::{FreeBsd, FreeBsdTree};
pub use identity::identity;
pub use linux_rcache::{LinuxRcache, RcacheCpu, RcacheShared};
pub use magazine::{Depot, MagazineCpu, MagazineLimits, Magazines};
pub use role::{AllocError, Allocation, IovaAllocator, Request, Returned};
pub use store::{Locked, RangeStore, Reusable};
pub use table_bitmap::{TableBitmap, TableBitmapCpu, TableCursor};
