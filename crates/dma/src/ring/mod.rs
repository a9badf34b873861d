//! The driver of the ring IOMMU: the entries of one ring, and who may have which (rIOMMU section 4, "Software", Fig. 11).
//!
//! | file | one concept |
//! |---|---|
//! | `layout.rs` | rDEVICE, rRINGs and tables in one piece of memory |
//! | `table.rs` | [`Ring`]: map, unmap and release of slots, repaired |
//! | `free.rs` | which slots are free |
//! | `lines.rs` | which cache lines have to be written back |
//! | `list.rs` | the slots of one scatterlist |
//! | `owned.rs` | [`OwnedRing`]: a ring that one driver owns, with its burst |
//! | `literal.rs` | [`LiteralRing`]: Fig. 11 as printed, defects included |
//!
//! What several processors share is a [`Ring`] behind the embedder's lock: [`Rings`](crate::space::Rings). Decision 0010 says
//! why it is so.

mod error;
mod free;
mod layout;
mod lines;
mod list;
mod literal;
mod owned;
mod table;

pub use error::{RingError, RingFull, RingRefusal, Wait};
pub use layout::{RingSetup, Tables, lay_out};
pub use lines::Lines;
pub use literal::LiteralRing;
pub use owned::{OwnedRing, RingMapping, RingUnmapError};
pub use table::{Ring, SlotChoice, Stalls};
