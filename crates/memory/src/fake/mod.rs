//! Fakes for tests: memory seen by a device that does not snoop CPU caches, a frame source that
//! fails on request and counts wrong frees, a few pages at arbitrary addresses for hostile tables,
//! and registers with any values. The first two punish misuse.

mod faulty_frames;
mod non_coherent;
mod registers;
mod sparse_memory;

pub use faulty_frames::FaultyFrames;
pub use non_coherent::NonCoherent;
pub use registers::AnyRegisters;
pub use sparse_memory::SparseMemory;
