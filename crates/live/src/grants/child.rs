//! A sandbox process and the time that the daemon spends waiting for it. Several threads share it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::lateness::{ALLOWANCE, AllowanceExceeded, Lateness};

/// Time for a killed process to exit. After it the process counts as stuck in the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Most time within a minute that the device's own thread waits for its process, for resets and for
/// changes of Bus Master Enable. The guest decides how often it waits, so the sum exceeds one wait.
const DEVICE_ALLOWANCE: Duration = Duration::from_secs(20);

/// A process that any thread can kill.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    /// Becomes readable when the process exits.
    pidfd: OwnedFd,
    child: Mutex<Child>,
    /// True if the process did not exit within [`KILL_TIMEOUT`] of a kill.
    stuck: AtomicBool,
    /// Origin of the times in both `Lateness`.
    started: Instant,
    /// Lateness in waits by the IOMMU.
    for_iommu: Mutex<Lateness>,
    /// Lateness in waits by the process's own device.
    for_device: Mutex<Lateness>,
}

/// Waiter whose allowance is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// The IOMMU, which blocks all devices.
    Iommu,
    /// The process's own device alone.
    Device,
}

impl ChildProcess {
    pub(crate) fn new(child: Child) -> io::Result<Self> {
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

    /// Creates a process that counts as stuck in the kernel until `exited` is readable.
    #[cfg(test)]
    pub(crate) fn stuck(child: Child, exited: OwnedFd) -> io::Result<Self> {
        let mut process = Self::new(child)?;
        process.pidfd = exited;
        process.stuck = AtomicBool::new(true);
        Ok(process)
    }

    /// Returns the time that `who` may still wait for this process within the current minute.
    pub(crate) fn patience(&self, who: Waiter) -> Duration {
        let now = self.started.elapsed();
        let mut lateness = self
            .lateness(who)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        lateness.remaining(now)
    }

    /// Charges `late` to the allowance of `who`.
    ///
    /// # Errors
    /// [`AllowanceExceeded`] if the allowance is exhausted.
    pub(crate) fn charge(&self, who: Waiter, late: Duration) -> Result<(), AllowanceExceeded> {
        let now = self.started.elapsed();
        let mut lateness = self
            .lateness(who)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        lateness.charge(now, late)
    }

    /// Gives `who` another allowance, unused.
    #[cfg(test)]
    pub(crate) fn allow(&self, who: Waiter, allowance: Duration) {
        *self.lateness(who).lock().unwrap() = Lateness::new(allowance);
    }

    fn lateness(&self, who: Waiter) -> &Mutex<Lateness> {
        match who {
            Waiter::Iommu => &self.for_iommu,
            Waiter::Device => &self.for_device,
        }
    }

    /// Returns the process ID.
    pub(crate) fn pid(&self) -> u32 {
        self.child
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .id()
    }

    /// Sends SIGKILL and does not wait for the process to exit.
    pub(crate) fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Returns true if the process was killed, is stuck in the kernel and has not exited yet.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Acquire) && !self.kill_and_wait()
    }

    /// Kills the process and waits until it has exited and released its memory. Returns false if it
    /// is stuck in the kernel: it executes no more of its own instructions but still has its
    /// memory.
    #[must_use = "it may still have its memory"]
    pub(crate) fn kill_and_wait(&self) -> bool {
        self.kill();
        // Only the first caller waits; later callers poll.
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
