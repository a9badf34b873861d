//! IOVA allocators, one per file. An allocator implements [`IovaAllocator`]. A [`RangeStore`]
//! becomes one behind [`Locked`], [`LockedEiovar`] or [`LinuxRcache`].
//!
//! Allocators and their constructors; the first axis of a mode selects one (`docs/IDS.md` has their
//! ids):
//!
//! - Linux 3.4's cached node: `Locked::new(CachedTree::new(space), RefCell::new)`
//! - Linux's vmalloc allocator, first fit, its ancestor: `Locked::new(VmallocTree::new(space), ..)`
//! - EIOVAR, freelists in front of any [`RangeStore`]:
//!   `Locked::new(Eiovar::new(CachedTree::new(space), Capacity::Unbounded), ..)`
//! - FreeBSD's tree with the largest gap: `Locked::new(FreeBsdTree::new(space), ..)`
//! - the bitmap, one flush per wrap: `Bitmap::new(space, ..)`
//! - a bitmap in the flat table itself: `TableBitmap::new(memory, table, space, ..)`
//! - current Linux: `LinuxRcache::new(CachedTree::new(space), ..)`
//! - Linux with the maple-tree series of 2026: `LinuxRcache::new(LinuxMaple::new(space), ..)`
//! - magazines, the default: `Magazines::new(space, MagazineLimits::DEFAULT, ..)`
//! - blocks of 64 pages, in front of an allocator that frees a range with the proof of its
//!   invalidation: `Contiguous::new(magazines, most, ..)`
//! - the buffer's own address: [`identity`], not an allocator
//!
//! `space` is the range of pages to allocate from. The last argument creates the lock around the
//! shared state: `RefCell::new` on one thread, `Mutex::new` or a kernel's own lock elsewhere. Each
//! CPU has a handle for its own state.
//!
//! A range is allocated again only after the proof that no translation cache holds it. The bitmaps
//! accept a range without it, and need the proof of a flush when their search wraps. The others
//! need it for each range:
//!
//! ```
//! use std::cell::RefCell;
//!
//! use ringfence_iova::{AllocRequest, IovaAllocator, MagazineLimits, Magazines};
//! use ringfence_types::{
//!     CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, Pending, Pfn,
//!     PfnRange, Ticket, Unmapped,
//! };
//!
//! /// Your IOMMU. This one completes each invalidation at once.
//! struct Unit;
//!
//! impl Invalidator for Unit {
//!     fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
//!         Ok(Ticket::new(0))
//!     }
//!     fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
//!         Ok(true)
//!     }
//! }
//!
//! let space = PfnRange::inclusive(Pfn::new(1), Pfn::MAX).ok_or("empty")?;
//! let alloc = Magazines::new(space, MagazineLimits::DEFAULT, RefCell::new)?;
//! let mut cpu = alloc.per_cpu();
//!
//! // Four pages for a device that drives 32 address bits.
//! let request = AllocRequest::new(4, Pfn::new(0xf_ffff));
//! let range = alloc.alloc(&mut cpu, &request)?.range;
//! assert!(range.pages() == 4 && range.hi() <= request.limit);
//!
//! // After the DMA: the table has cleared the entries, and the unit invalidates them.
//! let domain = DomainId::new(1);
//! let unmapped = Unmapped::attest_cleared(domain, range);
//! let invalidation = Invalidation::Pages { domain, range, levels: CachedLevels::Leaves };
//! let pending = Pending::submit(&mut Unit, invalidation, unmapped).map_err(|(_, error)| error)?;
//! let flushed = pending.wait(&mut Unit).map_err(|(_, error)| error)?;
//! alloc.free(&mut cpu, flushed);
//! // This CPU's magazine supplies the same range again.
//! assert_eq!(alloc.alloc(&mut cpu, &request)?.range, range);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod allocator;
mod bitmap;
mod cached_rbtree;
mod contiguous;
mod debug_check;
mod eiovar;
mod free_space;
mod freebsd;
mod identity;
mod linux_maple;
mod linux_rcache;
mod locked;
pub mod magazine;
mod next_fit;
mod rbtree;
mod table_bitmap;
mod vmalloc;

pub use allocator::{AllocError, AllocRequest, Allocation, FreeProof, IovaAllocator};
pub use bitmap::{Bitmap, BitmapCpu, BitmapState};
pub use cached_rbtree::{CachedRbTree, CachedTree, InitialRangesError};
pub use contiguous::{Contiguous, ContiguousCpu, FreeBlocks};
pub use eiovar::{Capacity, Eiovar, LockedEiovar};
pub use free_space::FreeSpace;
pub use freebsd::{FreeBsd, FreeBsdTree};
pub use identity::identity;
pub use linux_maple::LinuxMaple;
pub use linux_rcache::{LinuxRcache, RcacheCpu, RcacheShared};
pub use locked::{Locked, RangeStore, ReusableRange};
pub use magazine::{Depot, MagazineCpu, MagazineLimits, Magazines};
pub use next_fit::NextFit;
pub use table_bitmap::{TableBitmap, TableBitmapCpu, TableCursor};
pub use vmalloc::{Vmalloc, VmallocTree};
