//! Rings: arrays of descriptors in memory that a driver and a device share (OS06; rIOMMU section
//! 2.3).
//!
//! | file | one concept |
//! |---|---|
//! | `size.rs` | how many entries, and where one stands |
//! | `memory.rs` | the array, as the driver and as the device reach it |
//! | `completion.rs` | what a device has done, told by a phase bit |
//! | `coalesce.rs` | when it interrupts |
//! | `queue.rs` | descriptors and completions together: what a driver of an in-order ring keeps |

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
pub use size::{Cursor, RingSize};
