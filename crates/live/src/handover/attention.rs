//! How a device's thread is asked to stand still at the end of a turn, and what it is told to do then.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use super::{HandedDevice, Unmovable};

/// What a device that stands still is told. When nobody is left to tell it anything, it goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// Say what you have.
    Save,
    /// Let go of everything.
    Leave,
}

/// What it says.
#[derive(Debug)]
pub(crate) enum Answer {
    /// It stands still.
    Stopped,
    /// This it has.
    Saved(Box<Result<HandedDevice, Unmovable>>),
    /// It is at work still, and goes on.
    Working,
    /// It has let go of everything.
    Left,
    /// Of everything but what works for it, which was ended and hangs in the kernel.
    Hangs,
}

/// The caller's side, until it is dropped.
#[derive(Debug)]
pub(crate) struct Called {
    pub(crate) orders: Sender<Order>,
    pub(crate) answers: Receiver<Answer>,
}

/// The device's side.
#[derive(Debug)]
pub(crate) struct Round {
    /// So long it is waited for.
    pub(crate) until: Instant,
    pub(crate) orders: Receiver<Order>,
    pub(crate) answers: Sender<Answer>,
}

/// A device's bell. Clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Attention(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    bell: OwnedFd,
    round: Mutex<Option<Round>>,
}

impl Attention {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(Inner {
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            round: Mutex::new(None),
        })))
    }

    /// Readable while somebody calls.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.0.bell.as_fd()
    }

    /// Asks the device to stand still by then. A call that was not answered is forgotten.
    pub(crate) fn call(&self, until: Instant) -> Called {
        let (orders, taken) = channel();
        let (given, answers) = channel();
        *self.slot() = Some(Round {
            until,
            orders: taken,
            answers: given,
        });
        let _ = rustix::io::write(&self.0.bell, &1u64.to_ne_bytes());
        Called { orders, answers }
    }

    /// The call that rang, if it has not been taken back.
    pub(crate) fn take(&self) -> Option<Round> {
        let _ = rustix::io::read(&self.0.bell, &mut [0; 8]);
        self.slot().take()
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Option<Round>> {
        self.0.round.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
