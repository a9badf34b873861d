//! Fakes for tests: memory seen by a device that does not snoop CPU caches, a frame source that
//! fails on request and counts wrong frees, and a few pages at arbitrary addresses for hostile
//! tables. The first two punish misuse.
//! request and tracks its frames, and a memory of a few pages for hostile tables.

mod faulty_frames;
mod non_coherent;
mod sparse_memory;

pub use faulty_frames::FaultyFrames;
pub use non_coherent::NonCoherent;
pub use sparse_memory::SparseMemory;
