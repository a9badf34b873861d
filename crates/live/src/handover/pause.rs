//! How a device's thread is asked to stand still at the end of a turn, and what it is told to do
//! then.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use super::{HandOverBlocker, SavedDevice};

/// What a device that stands still is told. When nobody is left to tell it anything, it goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PauseCommand {
    /// Say what you have.
    Save,
    /// Let go of everything.
    Release,
}

/// What it says.
#[derive(Debug)]
pub(crate) enum PauseReply {
    /// It stands still.
    Stopped,
    /// This it has.
    Saved(Box<Result<SavedDevice, HandOverBlocker>>),
    /// It is at work still, and goes on.
    Busy,
    /// It has let go of everything.
    Released,
    /// Of everything but what works for it, which was ended and hangs in the kernel.
    Stuck,
}

/// The caller's side, until it is dropped.
#[derive(Debug)]
pub(crate) struct PauseRequester {
    pub(crate) commands: Sender<PauseCommand>,
    pub(crate) replies: Receiver<PauseReply>,
}

/// The device's side.
#[derive(Debug)]
pub(crate) struct PauseRequest {
    /// So long it is waited for.
    pub(crate) until: Instant,
    pub(crate) commands: Receiver<PauseCommand>,
    pub(crate) replies: Sender<PauseReply>,
}

/// A device's bell. Clones are the same one.
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

    /// Readable while somebody calls.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.wake_fd.as_fd()
    }

    /// Asks the device to stand still by then. A call that was not answered is forgotten.
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

    /// The call that rang, if it has not been taken back.
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
