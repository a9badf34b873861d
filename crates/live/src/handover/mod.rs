//! Hand-over of a guest's devices from one process to another while the guest runs.
//!
//! [`SavedDevices`] contains the complete state, as values and as a stream of bytes and
//! descriptors. `source` runs in the process that serves the devices, `destination` in the process
//! that takes them over. Decision 0020 compares the hand-over with a live migration.
//!
//! | sender | message | meaning |
//! |---|---|---|
//! | destination | copy | requests a copy of the state; may be repeated |
//! | source | stream | each device pauses by itself, for one copy |
//! | destination | stop | requests the hand-over |
//! | source | stream | all devices are paused before the source copies the first |
//! | destination | rebuilt | confirms that all devices are rebuilt |
//! | source | released | the source has released the guest's memory and all sockets |
//! | source | refused | no copy was made |
//! | source | kept | the source has resumed the devices |
//! | source | orphaned | the source cannot stop a released device; no process owns the devices |
//!
//! The destination validates a whole stream before it uses any part of it. The source answers a
//! failed copy with `refused`. Until the confirmation the source owns the devices: if the
//! destination fails or is late, the source resumes them and sends `kept`. After the confirmation
//! the destination owns them. If the source then cannot stop a device, no process owns the devices;
//! the source sends `orphaned` with that reason and exits.

mod channel;
mod client;
mod destination;
mod error;
mod pause;
mod serve_loop;
mod source;
mod state;

pub use client::SessionState;
pub(crate) use destination::HandOverDestination;
pub use destination::TakeOverStats;
pub use error::TakeOverError;
pub(crate) use pause::{PauseCommand, PauseHandle, PauseReply, PauseRequester};
pub(crate) use serve_loop::{HandOverFunction, save, serve_device};
pub use source::HandOverTimeouts;
pub(crate) use source::{HandOverSource, SourceOutcome, serve_destination};
pub use state::{FunctionState, SavedDevice, SavedDevices, VERSION};

pub use crate::iommu::RecordState;
pub use crate::link::{LinkState, PeerState};
pub use crate::memory::RangeState;
pub use crate::pci::PlainState;
pub use crate::pviommu::PviommuState;
pub use crate::riommu::RiommuState;
pub use crate::saved_state::{HandOverBlocker, MAX_STREAM_BYTES, StateError};
pub use crate::virtio::net::{NetState, PendingFrameState};
pub use crate::virtio::{CommonState, DeviceState, DiskKind, QueueSlot, VirtioState};

/// Name of the socket at which the source waits for a destination.
pub const CONTROL: &str = "control.sock";
