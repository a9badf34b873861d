//! I/O page tables: walk, map and unmap written once over a [`Format`]; one format a file under
//! `fmt/`.
//!
//! ```text
//! map:   Table::map -> (reserve frames) -> entries, the valid word last -> lines written back, one wait
//! unmap: Table::unmap -> entries cleared -> lines written back, one wait -> Unmapped, and what must be invalidated
//! walk:  walk(format, memory, Cursor, iova) -> Leaf or WalkError, over memory that may hold anything
//! ```
//! The flat tables of a ring IOMMU have no walk and no levels: an entry is found by index, stored
//! and cleared in place (`ring.rs`).
//!
//! Tables lie in memory reached through [`PhysMemory`](ringfence_types::PhysMemory), in the bits
//! that hardware reads.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod coherency;
mod context;
mod error;
mod fmt;
mod format;
mod frame_reserve;
mod leaf_cache;
mod map;
mod reclaim;
mod ring;
mod table;
mod unmap;
mod walk;
mod write_back;

pub use coherency::Coherency;
pub use context::{Context, ContextError, ContextTables, TranslationType, find_context};
pub use error::{MapError, TableError, UnmapError};
pub use fmt::{CalgaryTce, Levels, SecondStage, Snoop};
pub use fmt::{
    MAX_RING_BUFFER, MAX_RING_SLOTS, RING_ENTRY_BYTES, RingDevice, RingFormatError, RingPte,
    RingTable,
};
pub use format::{Entry, Format, Level};
pub use leaf_cache::LeafCache;
pub use map::MapRequest;
pub use reclaim::{Reclaim, ReclaimingTable, UnlinkedTables};
pub use ring::{RingWalkError, RingWords, ring_words};
pub use table::Table;
pub use walk::{Cursor, Leaf, WalkError, WalkErrorKind, walk};
pub use write_back::DirtyLines;
