//! A guest's devices handed over from one process to another, while the guest runs.
//!
//! [`SavedDevices`] is all that has to cross, as values, and its stream of bytes and descriptors;
//! `source` is the process that has the devices, `destination` the one that takes them over.
//! Decision 0020 says what this shows of a live migration and what it does not.
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
//! A stream is checked whole before anything of it is used. Until the confirmation has come the
//! devices are the first one's: whatever happens to the second, or takes it too long, the first
//! goes on with them, and says `kept` to whoever is still there. From the confirmation on they are
//! the second one's.

mod bytes;
mod channel;
mod client;
mod destination;
mod error;
mod function;
mod net;
mod pause;
mod record;
mod serve_loop;
mod source;
mod state;

pub use client::{RangeState, SessionState};
pub(crate) use destination::HandOverDestination;
pub use destination::TakeOverStats;
pub use error::{HandOverBlocker, StateError, TakeOverError};
pub use function::{CommonState, FunctionState, QueueSlot};
pub use net::{LinkState, NetState, PeerState, PendingFrameState};
pub(crate) use pause::{PauseCommand, PauseHandle, PauseReply, PauseRequester};
pub use record::RecordState;
pub(crate) use serve_loop::{save, serve_device};
pub use source::HandOverTimeouts;
pub(crate) use source::{HandOverSource, SourceOutcome, serve_destination};
pub use state::{
    DeviceState, DiskKind, MAX_STREAM_BYTES, PviommuState, SavedDevice, SavedDevices, VERSION,
};

/// Name of the socket at which the first process waits for a second one.
pub const CONTROL: &str = "control.sock";
