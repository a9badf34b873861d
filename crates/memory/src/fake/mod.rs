//! Fakes that punish misuse: a memory behind caches without snooping, a frame source that fails on
//! request and tracks its frames, and a memory of a few pages for hostile tables.

mod faulty_frames;
mod non_coherent;
mod sparse_memory;

pub use faulty_frames::FaultyFrames;
pub use non_coherent::NonCoherent;
pub use sparse_memory::SparseMemory;
