//! Fakes that punish misuse: a memory with caches that do not snoop, a frame source that runs dry
//! and keeps accounts, and a memory of a few pages for hostile tables.

mod faulty_frames;
mod non_coherent;
mod sparse_memory;

pub use faulty_frames::FaultyFrames;
pub use non_coherent::NonCoherent;
pub use sparse_memory::SparseMemory;
