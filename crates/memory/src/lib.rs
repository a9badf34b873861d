//! Memory behind [`PhysMemory`](ringfence_types::PhysMemory): one sparse mapped [`Arena`] that
//! holds tables, rings and buffers at the addresses a trace or a driver gives them, the host's real
//! cache-line write-back, and [`Frames`] for tables.
//!
//! Unsafe code stands in two files: `mapping.rs` (the mapping and the words in it) and `line.rs`
//! (write-back instructions). [`fake`] has memories and frame sources that punish misuse, for
//! tests.

mod arena;
mod bytes;
pub mod fake;
mod frames;
mod line;
mod mmap_region;

pub use arena::{Arena, ArenaError};
pub use frames::Frames;
pub use line::WriteBack;
