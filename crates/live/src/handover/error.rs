//! Errors of a hand-over.

use std::io;

use crate::saved_state::StateError;

/// Error of a take-over.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// The source does not answer, or has closed the connection.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Another user owns the process that serves the devices.
    #[error("the process that serves the devices belongs to user {user}")]
    OtherUser {
        /// ID of that user.
        user: u32,
    },
    /// A reply did not arrive in time.
    #[error("the source did not answer in time")]
    TimeOut,
    /// The source refused to hand the devices over, for the given reason.
    #[error("the source refused the hand-over: {0}")]
    Refused(String),
    /// The source did not release the devices, for the given reason, and has resumed them.
    #[error("the source kept the devices: {0}")]
    Kept(String),
    /// No process serves the devices, for the given reason: the source released them, but it cannot
    /// stop one of them, or this process cannot start a thread.
    #[error("no process serves the devices: {0}")]
    Orphaned(String),
    /// The source sent a malformed or unexpected message.
    #[error("the source sent a malformed or unexpected message")]
    Message,
    /// The state that the source sent is invalid.
    #[error("invalid state: {0}")]
    State(#[from] StateError),
}
