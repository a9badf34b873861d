//! I/O page tables. Walk, map and unmap are written once, generic over a [`Format`]; each file
//! under `fmt/` holds one format.
//!
//! ```text
//! map:   Table::map -> reserve frames -> store entries, the valid word last
//!                  -> write back dirty lines, wait once
//! unmap: Table::unmap -> clear entries -> write back dirty lines, wait once
//!                    -> Unmapped and the levels to invalidate
//! walk:  walk(format, memory, Cursor, iova) -> Leaf or WalkError; the memory may hold anything
//! ```
//! The flat tables of a ring IOMMU have no levels and need no walk. `ring.rs` finds an entry by
//! index and stores or clears it in place.
//!
//! The tables lie in memory that the caller provides as
//! [`PhysMemory`](ringfence_types::PhysMemory), in the bit layout that the hardware reads.
//!
//! Four pages of a VT-d second stage, mapped, walked as a unit would, and unmapped:
//!
//! ```
//! use ringfence_memory::{Arena, Frames};
//! use ringfence_pgtable::{Coherency, Levels, MapRequest, SecondStage, Table, WalkErrorKind};
//! use ringfence_types::{
//!     Access, CachedLevels, DomainId, Iova, Permissions, Pfn, PfnRange, PhysAddr, PhysRange,
//! };
//!
//! let memory = Arena::new(1 << 20)?;
//! let frames = Frames::new(&memory, PhysRange::new(PhysAddr::ZERO, 1 << 20).ok_or("empty")?);
//! let format = SecondStage::new(Levels::Four);
//! let table = Table::new(format, DomainId::new(1), Coherency::Coherent, &memory, &frames)?;
//! table.map(
//!     &memory,
//!     &frames,
//!     MapRequest {
//!         iova: Iova::new(0x10_0000),
//!         pa: PhysAddr::new(0x9_0000),
//!         pages: 4,
//!         permissions: Permissions::READ,
//!     },
//! )?;
//!
//! let address = Iova::new(0x10_2040);
//! let leaf = table.walk(&memory, address)?;
//! assert_eq!(leaf.translate(address), PhysAddr::new(0x9_2040));
//! assert!(!leaf.permissions.allows(Access::Write));
//!
//! let pages = PfnRange::new(Pfn::new(0x100), 4).ok_or("empty")?;
//! let (unmapped, levels) = table.unmap(&memory, pages)?;
//! // The table pages stay linked: an invalidation of the leaves is enough.
//! assert_eq!((unmapped.range(), levels), (pages, CachedLevels::Leaves));
//! let walked = table.walk(&memory, address).map_err(|error| error.kind);
//! assert_eq!(walked, Err(WalkErrorKind::NotPresent));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod coherency;
mod context;
mod entry_count;
mod error;
mod flat_format;
mod fmt;
mod format;
mod frame_reserve;
mod freebsd_reclaim;
mod half_word_table;
mod leaf_cache;
mod leaf_run;
mod map;
mod pasid_entry;
mod ring;
mod table;
mod table_memory;
mod unmap;
mod walk;
mod write_back;

pub use coherency::Coherency;
pub use context::{
    Context, ContextError, ContextTables, PageRequests, TranslationType, find_context,
};
pub use error::{MapError, TableError, UnmapError};
pub use flat_format::{FlatFormat, HalfWord};
pub use fmt::{AmdV1, AmdV2, CalgaryTce, Dart, FirstStage, Gart, Levels, SecondStage, Snoop};
pub use fmt::{Arm, Granule, Granule4K, Granule16K, Granule64K, MemoryType, RiscV};
pub use fmt::{
    MAX_RING_BUFFER, MAX_RING_SLOTS, RING_ENTRY_BYTES, RingDevice, RingFormatError, RingPte,
    RingTable,
};
pub use format::{Entry, Format, Level};
pub use freebsd_reclaim::{ReclaimingTable, UnlinkedTables, WriteBackSpan};
pub use half_word_table::{DartTable, EmptyEntry, GartTable, HalfWordTable};
pub use leaf_cache::LeafCache;
pub use map::MapRequest;
pub use pasid_entry::NestedEntry;
pub use ring::{RingWalkError, RingWords, ring_words};
pub use table::Table;
pub use table_memory::TableMemory;
pub use walk::{Cursor, Leaf, WalkError, WalkErrorKind, walk};
pub use write_back::DirtyLines;
