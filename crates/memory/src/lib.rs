//! Memory behind [`PhysMemory`](ringfence_types::PhysMemory). A sparse mapped [`Arena`] holds
//! tables, rings and buffers at the addresses that a trace or a driver gives them, and uses the
//! host's real cache-line write-back. [`Frames`] allocates table frames.
//!
//! Two files contain unsafe code: `mmap_region.rs` (the mapping, its words and their copies) and
//! `line.rs` (write-back instructions). [`fake`] has memories and frame sources for tests that
//! punish misuse.
//!
//! Frames for tables lie above the buffers. A device that does not snoop sees an entry only after
//! its cache line was written back:
//!
//! ```
//! use std::sync::atomic::Ordering;
//!
//! use ringfence_memory::{Arena, Frames};
//! use ringfence_types::{FrameSource, PhysAddr, PhysMemory, PhysRange};
//!
//! let memory = Arena::with_device_view(16 << 20)?;
//! let tables = PhysRange::new(PhysAddr::new(8 << 20), 8 << 20).ok_or("empty")?;
//! let frames = Frames::new(&memory, tables);
//!
//! // The CPU stores an entry into a new table.
//! let table = frames.alloc_zeroed()?;
//! assert!(tables.contains_address(table));
//! memory.table(table)?[5].store(0x9000 | 3, Ordering::Release);
//!
//! let entry = table.wrapping_add(5 * 8);
//! let device = memory.device_view().ok_or("snoops")?.memory();
//! assert_eq!(device.word(entry)?.load(Ordering::Acquire), 0);
//! memory.write_back(entry, 8);
//! memory.drain();
//! assert_eq!(device.word(entry)?.load(Ordering::Acquire), 0x9003);
//!
//! frames.free(table);
//! assert_eq!((frames.in_use(), frames.peak()), (0, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

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
