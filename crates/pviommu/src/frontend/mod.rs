//! The guest's side (PVIOMMU paper, sections 4.1 and 4.3): maps and unmaps as requests on a queue.
//!
//! ```text
//! map, unmap -> Channel::map, unmap -> Queue::add      (without waiting)
//! sync       -> Queue::kick, once -> Queue::poll until the maps are answered
//! invalidate -> Queue::poll until the unmaps are answered; only then are their addresses free
//! ```
//! [`RemoteTable`] is an [`IoPageTable`](ringfence_dma::space::IoPageTable): it works with any
//! allocator of `iova` and any flush policy of `dma`. [`UnmapCompletions`] is its
//! [`Invalidator`](ringfence_types::Invalidator). Decision 0002 sketched both.
//!
//! The frontend does not trust the host. A late, duplicate, out-of-order or missing answer breaks
//! the channel. Addresses whose unmap the host did not confirm are never reused. There is no clock:
//! time-outs are counts of polls.

mod channel;
mod completions;
mod queue;
mod remote_table;

pub use channel::{Channel, ChannelFailure, ChannelOptions, ChannelStats, RemoteMapError};
pub use completions::UnmapCompletions;
pub use queue::{Queue, QueueFull, RequestId, Used};
pub use remote_table::{RemoteTable, SharedChannel};
pub use ringfence_dma::space::{CacheState, CachedSpace, UnknownUnmap};
