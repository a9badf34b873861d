//! Memory behind [`PhysMemory`](ringfence_types::PhysMemory). A sparse mapped [`Arena`] holds
//! tables, rings and buffers at the addresses that a trace or a driver gives them, and uses the
//! host's real cache-line write-back. [`Frames`] allocates table frames.
//!
//! Two files contain unsafe code: `mmap_region.rs` (the mapping, its words and their copies) and
//! `line.rs` (write-back instructions). [`fake`] has memories and frame sources for tests that
//! punish misuse.

#![deny(unsafe_code)]

mod arena;
mod bytes;
mod device_view;
pub mod fake;
mod frames;
mod line;
mod mmap_region;

pub use arena::{Arena, ArenaError};
pub use device_view::DeviceView;
pub use frames::Frames;
pub use line::WriteBack;
