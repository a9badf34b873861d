//! The guest's side (sections 4.1 and 4.3): mappings as requests on a queue.
//!
//! ```text
//! map, unmap -> Channel::map, unmap -> Queue::add      (nothing is waited for)
//! sync       -> Queue::kick, once -> Queue::poll until the maps are answered
//! invalidate -> Queue::poll until the unmaps are answered; only then are their addresses free
//! ```
//! [`RemoteTable`] is a [`IoPageTable`](ringfence_dma::space::IoPageTable), so any allocator of
//! `iova` and any flush policy of `dma` stand in front of it; [`UnmapCompletions`] is its
//! [`Invalidator`](ringfence_types::Invalidator). Decision 0002 sketched both.
//!
//! The host behind the queue is not believed: what it answers late, twice, out of order or not at
//! all breaks the channel, and addresses whose unmap it did not confirm are never given out again.
//! There is no clock: time-outs are counts of polls.

mod by_giova;
mod channel;
mod completions;
mod queue;
mod remote_table;
mod rtc_space;

pub use channel::{Channel, ChannelFailure, ChannelOptions, ChannelStats, RemoteMapError};
pub use completions::UnmapCompletions;
pub use queue::{Queue, QueueFull, RequestId, Used};
pub use remote_table::{RemoteTable, SharedChannel};
pub use rtc_space::{DeviceCache, RtcSpace, UnknownUnmap};
