//! IOVA allocators, one a file, behind one role: [`IovaAllocator`].
//!
//! | question 1 answered by | made with | ids |
//! |---|---|---|
//! | Linux 3.4's tree with a cached node | `Locked::new(CachedTree::new(space), RefCell::new)` | AL01-AL03, AL15 |
//! | vmalloc's first fit, its ancestor | `Locked::new(VmallocTree::new(space), ..)` | AL14 |
//! | EIOVAR's freelists in front of any [`RangeStore`] | `Locked::new(Eiovar::new(CachedTree::new(space), Capacity::Unbounded), ..)` | AL04-AL06 |
//! | FreeBSD's tree with the largest gap | `Locked::new(FreeBsdTree::new(space), ..)` | AL07 |
//! | a bitmap, next fit, one flush a lap | `Bitmap::new(space, ..)`, `Bitmap::literal(space, ..)` | AL09-AL11 |
//! | the flat table as the bitmap | `TableBitmap::new(memory, table, space, ..)` | AL13 |
//! | today's Linux | `LinuxRcache::new(CachedTree::new(space), ..)` | |
//! | magazines of every size, the product's default | `Magazines::new(space, MagazineLimits::DEFAULT, ..)` | |
//! | the buffer itself | [`identity`], not an allocator | |
//!
//! `space` is the range of pages to hand out; the last argument makes the lock around what
//! processors share: `RefCell::new` on one thread, `Mutex::new` or a kernel's own elsewhere. What
//! they do not share is a handle, one a processor.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod allocator;
mod bitmap;
mod cached_rbtree;
mod debug_check;
mod eiovar;
mod free_space;
mod freebsd;
mod identity;
mod linux_rcache;
mod locked;
pub mod magazine;
mod rbtree;
mod table_bitmap;
mod vmalloc;

pub use allocator::{AllocError, AllocRequest, Allocation, FreeProof, IovaAllocator};
pub use bitmap::{Bitmap, BitmapCpu, BitmapState};
pub use cached_rbtree::{CachedRbTree, CachedTree, SeedError};
pub use eiovar::{Capacity, Eiovar, LockedEiovar};
pub use free_space::FreeSpace;
pub use freebsd::{FreeBsd, FreeBsdTree};
pub use identity::identity;
pub use linux_rcache::{LinuxRcache, RcacheCpu, RcacheShared};
pub use locked::{Locked, RangeStore, ReusableRange};
pub use magazine::{Depot, MagazineCpu, MagazineLimits, Magazines};
pub use table_bitmap::{TableBitmap, TableBitmapCpu, TableCursor};
pub use vmalloc::{Vmalloc, VmallocTree};
