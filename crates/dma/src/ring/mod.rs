//! The driver of the ring IOMMU: the entries of one ring, and who may have which (rIOMMU section 4,
//! "Software", Fig. 11).
//!
//! | file | one concept |
//! |---|---|
//! | `layout.rs` | rDEVICE, rRINGs and tables in one piece of memory |
//! | `table.rs` | [`Ring`]: map, unmap and release of slots, repaired |
//! | `slots.rs` | which slots may be taken, and which wait |
//! | `free.rs` | which slots are free |
//! | `lines.rs` | which cache lines have to be written back |
//! | `slot_links.rs` | the slots of one scatterlist |
//! | `owned.rs` | [`OwnedRing`]: a ring that one driver owns, with its burst |
//! | `mapping.rs` | [`RingMapping`]: what that driver holds |
//! | `cursor.rs` | a place in its table, for whoever goes through it in order |
//! | `as_published.rs` | [`RingAsPublished`]: Fig. 11 as printed, defects included |
//!
//! What several processors share is a [`Ring`] behind the embedder's lock:
//! [`Rings`](crate::space::Rings). Decision 0010 says why it is so.

mod as_published;
mod cursor;
mod dirty_lines;
mod error;
mod free;
mod layout;
mod mapping;
mod owned;
mod slot_links;
mod slots;
mod table;

pub use as_published::RingAsPublished;
pub use dirty_lines::DirtyRingLines;
pub use error::{FullReason, RingError, RingFull, RingRefusal};
pub use layout::{RingSetup, RingTables, lay_out};
pub use mapping::{RingMapping, RingUnmapError};
pub use owned::OwnedRing;
pub use slots::{SlotChoice, Stalls};
pub use table::Ring;
