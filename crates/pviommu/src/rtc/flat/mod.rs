//! A reverse translation cache in one flat table: 16 bytes an entry, four to a cache line, found by
//! hashing.
//!
//! What is asked of the document's tree (section 4.5) is never ordered: a key is there or not. So a
//! hit is one multiplication and a look at one line, seldom two. The queue of the document is gone
//! too: every entry carries the cycle of its release in eight bits, and the end of a cycle walks
//! the table in the order of memory, which costs less than the links of a queue did: an entry never
//! moves through a list, and a mapping that is reused leaves nothing behind.

mod cache;
mod slot;
mod table;

pub use cache::FlatRtc;
