//! Rings: arrays of descriptors in memory shared by a driver and a device (rIOMMU section
//! 2.3).
//!
//! | file | concept |
//! |---|---|
//! | `size.rs` | number of entries, and positions |
//! | `memory.rs` | the array, for the driver and for the device |
//! | `completion.rs` | completions, marked by a phase bit |
//! | `coalesce.rs` | interrupt coalescing |
//! | `queue.rs` | descriptors and completions of an in-order ring, for its driver |

mod coalesce;
mod completion;
mod memory;
mod queue;
mod size;

pub use coalesce::Coalesce;
pub use completion::{COMPLETION_BYTES, CompletionQueue, CompletionWriter, RawCompletion};
pub use memory::{RingBase, RingMemory};
pub use queue::{
    CompletionError, CompletionFault, MalformedCompletion, OrderedRing, RingAddresses,
};
pub use size::{RingCursor, RingSize};
