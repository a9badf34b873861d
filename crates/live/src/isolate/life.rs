//! The life of a device's process, as its several keepers in the daemon have it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// After a kill the process is gone in this time, or hangs in the kernel.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// A process that can be ended from any thread.
#[derive(Debug)]
pub(super) struct Life {
    /// Also readable once it is dead.
    pid: OwnedFd,
    child: Mutex<Child>,
}

impl Life {
    pub(super) fn new(child: Child) -> io::Result<Self> {
        let pid = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        Ok(Self {
            pid,
            child: Mutex::new(child),
        })
    }

    /// Its number.
    pub(super) fn number(&self) -> u32 {
        self.child
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .id()
    }

    /// Ends it; nothing of it runs any more soon.
    pub(super) fn kill(&self) {
        let _ = pidfd_send_signal(&self.pid, Signal::KILL);
    }

    /// Ends it and waits until it is gone, all its memory with it. False if it hangs in the kernel: then it runs no instruction of its own any more, and
    /// still has its memory.
    #[must_use = "it may still have its memory"]
    pub(super) fn end(&self) -> bool {
        self.kill();
        let limit = Timespec::try_from(GONE_WITHIN).ok();
        let mut dead = [PollFd::from_borrowed_fd(self.pid.as_fd(), PollFlags::IN)];
        loop {
            match poll(&mut dead, limit.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(1) => {
                    let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
                    return child.wait().is_ok();
                }
                _ => return false,
            }
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.end();
    }
}
