//! The driver of a ring IOMMU: it fills, clears and frees the entries of rings (rIOMMU section 4,
//! "Software", Fig. 11).
//!
//! | file | one concept |
//! |---|---|
//! | `layout.rs` | rDEVICE, rRINGs and tables in one piece of memory |
//! | `table.rs` | [`Ring`]: map, unmap and release of slots, repaired |
//! | `slots.rs` | the free and the withheld slots of a ring |
//! | `free.rs` | the set of free slots |
//! | `dirty_lines.rs` | the cache lines that must be written back |
//! | `slot_links.rs` | the slots of one scatterlist |
//! | `owned.rs` | [`OwnedRing`]: a ring that one driver owns, with its burst |
//! | `mapping.rs` | [`RingMapping`]: that driver's token of a mapping |
//! | `cursor.rs` | a position in a ring's table that advances in ring order |
//!
//! Several CPUs share a [`Ring`] behind the embedder's lock: [`Rings`](crate::space::Rings).
//! Decision 0010 gives the reasons.

mod cursor;
mod dirty_lines;
mod free;
mod layout;
mod mapping;
mod owned;
mod slot_links;
mod slots;
mod table;

pub use crate::error::{FullReason, RingError, RingFull, RingRefusal};
pub use dirty_lines::DirtyRingLines;
pub use layout::{RingSetup, RingTables, lay_out};
pub use mapping::{RingMapping, RingUnmapError};
pub use owned::OwnedRing;
pub use slots::{SlotChoice, Stalls};
pub use table::Ring;
