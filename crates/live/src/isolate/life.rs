//! The life of a device's process, as its several keepers in the daemon have it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::lateness::{ALLOWANCE, Lateness, Spent};

/// After a kill the process is gone in this time, or hangs in the kernel. It is waited for once.
const GONE_WITHIN: Duration = Duration::from_secs(5);
/// Most time within a minute that the device's own thread waits for its process: to reset, and to
/// leave its work. The guest decides how often, so the sum is larger than one wait.
const OWN_ALLOWANCE: Duration = Duration::from_secs(20);

/// A process that can be ended from any thread.
#[derive(Debug)]
pub(super) struct Life {
    /// Also readable once it is dead.
    pid: OwnedFd,
    child: Mutex<Child>,
    /// It was killed, waited for, and not gone.
    hangs: AtomicBool,
    /// What the accounts count from.
    begun: Instant,
    /// How long the IOMMU waited.
    for_iommu: Mutex<Lateness>,
    /// How long its own device did.
    for_device: Mutex<Lateness>,
}

/// Who waits for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    /// The IOMMU, and with it all devices.
    Iommu,
    /// The device alone.
    Device,
}

impl Life {
    pub(super) fn new(child: Child) -> io::Result<Self> {
        let pid = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        Ok(Self {
            pid,
            child: Mutex::new(child),
            hangs: AtomicBool::new(false),
            begun: Instant::now(),
            for_iommu: Mutex::new(Lateness::new(ALLOWANCE)),
            for_device: Mutex::new(Lateness::new(OWN_ALLOWANCE)),
        })
    }

    /// How long `who` may still wait for it.
    pub(super) fn patience(&self, who: Waits) -> Duration {
        let now = self.begun.elapsed();
        let mut account = self
            .account(who)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        account.left(now)
    }

    /// `who` waited so long for it.
    ///
    /// # Errors
    /// [`Spent`]: longer than it may.
    pub(super) fn charge(&self, who: Waits, late: Duration) -> Result<(), Spent> {
        let now = self.begun.elapsed();
        let mut account = self
            .account(who)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        account.charge(now, late)
    }

    /// Begins the account of `who` anew, with another allowance.
    #[cfg(test)]
    pub(super) fn allow(&self, who: Waits, allowance: Duration) {
        *self.account(who).lock().unwrap() = Lateness::new(allowance);
    }

    fn account(&self, who: Waits) -> &Mutex<Lateness> {
        match who {
            Waits::Iommu => &self.for_iommu,
            Waits::Device => &self.for_device,
        }
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
        // Whoever comes after the first one only looks.
        let limit = if self.hangs.load(Ordering::Acquire) {
            Duration::ZERO
        } else {
            GONE_WITHIN
        };
        let limit = Timespec::try_from(limit).ok();
        let mut dead = [PollFd::from_borrowed_fd(self.pid.as_fd(), PollFlags::IN)];
        loop {
            match poll(&mut dead, limit.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(1) => {
                    let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
                    return child.wait().is_ok();
                }
                _ => {
                    self.hangs.store(true, Ordering::Release);
                    return false;
                }
            }
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.end();
    }
}
