//! A reverse translation cache in one flat hash table: 16 bytes per entry, four entries per cache
//! line.
//!
//! The lookups in the PVIOMMU paper's tree (section 4.5) need no order: a key is present or absent.
//! A hit therefore costs one multiplication and one cache line, rarely two.
//!
//! The paper's queue is not needed either. Each entry has the cycle of its release in eight bits.
//! The end of a cycle walks the table in memory order, which costs less than maintaining a linked
//! queue.

mod cache;
mod slot;
mod table;

pub use cache::FlatCache;
