//! A guest's devices handed over from one process to another, while the guest runs.
//!
//! [`SavedDevices`] is all that has to cross, as values, and its stream of bytes and descriptors; `source` is the process that has the devices,
//! `destination` the one that takes them over. Decision 0020 says what this shows of a live migration and what it does not.
//!
//! | from | message | |
//! |---|---|---|
//! | the second | copy | as often as it likes |
//! | the first | stream | each device at the end of a turn of its own, and on it goes |
//! | the second | stop | |
//! | the first | stream | all devices stand still before the first of them is copied |
//! | the second | rebuilt | the confirmation |
//! | the first | gone | it has let go of all of the guest's memory and of every socket |
//!
//! A stream is checked whole before anything of it is used. Until the confirmation has come the devices are the first one's: whatever happens to the
//! second, or takes it too long, the first goes on with them, and says `kept` to whoever is still there. From the confirmation on they are the second one's.

mod serve_loop;
mod pause;
mod bytes;
mod channel;
mod client;
mod error;
mod function;
mod net;
mod source;
mod record;
mod state;
mod destination;

pub(crate) use serve_loop::{serve_device, save};
pub(crate) use pause::{PauseReply, PauseHandle, PauseRequester, PauseCommand};
pub use client::{RangeState, SessionState};
pub use error::{StateError, TakeOverError, HandOverBlocker};
pub use function::{CommonState, FunctionState, QueueSlot};
pub use net::{PendingFrameState, LinkState, NetState, PeerState};
pub use source::HandOverTimeouts;
pub(crate) use source::{HandOverSource, SourceOutcome, serve_destination};
pub use record::RecordState;
pub use state::{DiskKind, SavedDevices, SavedDevice, MAX_STREAM_BYTES, DeviceState, PviommuState, VERSION};
pub(crate) use destination::HandOverDestination;
pub use destination::TakeOverStats;

/// Name of the socket at which the first process waits for a second one.
pub const CONTROL: &str = "control.sock";
