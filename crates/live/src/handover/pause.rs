//! Pausing a device's thread at the end of a turn, and commands to the paused device.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use super::SavedDevice;
use crate::saved_state::HandOverBlocker;

/// A command to a paused device. The device resumes when the requester is dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PauseCommand {
    /// Return the state.
    Save,
    /// Release the device.
    Release,
}

/// Reply of a device.
#[derive(Debug)]
pub(crate) enum PauseReply {
    /// The device is paused.
    Stopped,
    /// State of the device.
    Saved(Box<Result<SavedDevice, HandOverBlocker>>),
    /// The turn did not end in time; the device continues.
    Busy,
    /// The device has released everything.
    Released,
    /// The device is released, but its process was killed and is stuck in the kernel.
    Stuck,
}

/// The requester's side of a pause. Dropping it resumes the device.
#[derive(Debug)]
pub(crate) struct PauseRequester {
    pub(crate) commands: Sender<PauseCommand>,
    pub(crate) replies: Receiver<PauseReply>,
}

/// The device's side of a pause.
#[derive(Debug)]
pub(crate) struct PauseRequest {
    /// Time at which the requester stops waiting.
    pub(crate) until: Instant,
    pub(crate) commands: Receiver<PauseCommand>,
    pub(crate) replies: Sender<PauseReply>,
}

/// Requests pauses of one device. Clones refer to the same device.
#[derive(Clone, Debug)]
pub(crate) struct PauseHandle(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    wake_fd: OwnedFd,
    pending: Mutex<Option<PauseRequest>>,
}

impl PauseHandle {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(Inner {
            wake_fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            pending: Mutex::new(None),
        })))
    }

    /// Returns a descriptor that is readable while a request is pending.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.wake_fd.as_fd()
    }

    /// Asks the device to pause before `until`. Replaces a request that the device has not taken.
    pub(crate) fn request_pause(&self, until: Instant) -> PauseRequester {
        let (orders, taken) = channel();
        let (given, answers) = channel();
        *self.pending() = Some(PauseRequest {
            until,
            commands: taken,
            replies: given,
        });
        let _ = rustix::io::write(&self.0.wake_fd, &1u64.to_ne_bytes());
        PauseRequester {
            commands: orders,
            replies: answers,
        }
    }

    /// Takes the pending request; `None` if there is none.
    pub(crate) fn take_request(&self) -> Option<PauseRequest> {
        let _ = rustix::io::read(&self.0.wake_fd, &mut [0; 8]);
        self.pending().take()
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, Option<PauseRequest>> {
        self.0
            .pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
