//! The life of a device's process, as its several keepers in the daemon have it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::lateness::{ALLOWANCE, AllowanceExceeded, Lateness};

/// After a kill the process is gone in this time, or hangs in the kernel. It is waited for once.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Most time within a minute that the device's own thread waits for its process: to reset, and to
/// leave its work. The guest decides how often, so the sum is larger than one wait.
const DEVICE_ALLOWANCE: Duration = Duration::from_secs(20);

/// A process that can be ended from any thread.
#[derive(Debug)]
pub(super) struct ChildProcess {
    /// Also readable once it is dead.
    pidfd: OwnedFd,
    child: Mutex<Child>,
    /// It was killed, waited for, and not gone.
    stuck: AtomicBool,
    /// What the accounts count from.
    started: Instant,
    /// How long the IOMMU waited.
    for_iommu: Mutex<Lateness>,
    /// How long its own device did.
    for_device: Mutex<Lateness>,
}

/// Who waits for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// The IOMMU, and with it all devices.
    Iommu,
    /// The device alone.
    Device,
}

impl ChildProcess {
    pub(super) fn new(child: Child) -> io::Result<Self> {
        let pid = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        Ok(Self {
            pidfd: pid,
            child: Mutex::new(child),
            stuck: AtomicBool::new(false),
            started: Instant::now(),
            for_iommu: Mutex::new(Lateness::new(ALLOWANCE)),
            for_device: Mutex::new(Lateness::new(DEVICE_ALLOWANCE)),
        })
    }

    /// How long `who` may still wait for it.
    pub(super) fn patience(&self, who: Waiter) -> Duration {
        let now = self.started.elapsed();
        let mut account = self
            .account(who)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        account.remaining(now)
    }

    /// `who` waited so long for it.
    ///
    /// # Errors
    /// [`AllowanceExceeded`]: longer than it may.
    pub(super) fn charge(&self, who: Waiter, late: Duration) -> Result<(), AllowanceExceeded> {
        let now = self.started.elapsed();
        let mut account = self
            .account(who)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        account.charge(now, late)
    }

    /// Begins the account of `who` anew, with another allowance.
    #[cfg(test)]
    pub(super) fn allow(&self, who: Waiter, allowance: Duration) {
        *self.account(who).lock().unwrap() = Lateness::new(allowance);
    }

    fn account(&self, who: Waiter) -> &Mutex<Lateness> {
        match who {
            Waiter::Iommu => &self.for_iommu,
            Waiter::Device => &self.for_device,
        }
    }

    /// Its number.
    pub(super) fn pid(&self) -> u32 {
        self.child
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .id()
    }

    /// Ends it; nothing of it runs any more soon.
    pub(super) fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Ends it and waits until it is gone, all its memory with it. False if it hangs in the kernel:
    /// then it runs no instruction of its own any more, and still has its memory.
    #[must_use = "it may still have its memory"]
    pub(super) fn kill_and_wait(&self) -> bool {
        self.kill();
        // Whoever comes after the first one only looks.
        let limit = if self.stuck.load(Ordering::Acquire) {
            Duration::ZERO
        } else {
            KILL_TIMEOUT
        };
        let limit = Timespec::try_from(limit).ok();
        let mut dead = [PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN)];
        loop {
            match poll(&mut dead, limit.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(1) => {
                    let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
                    return child.wait().is_ok();
                }
                _ => {
                    self.stuck.store(true, Ordering::Release);
                    return false;
                }
            }
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.kill_and_wait();
    }
}
