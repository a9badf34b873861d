//! A timer that expires a fixed time after its start.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::event::PollSource;

/// A one-shot timer with a fixed delay.
#[derive(Debug)]
pub(crate) struct DelayTimer {
    timer: OwnedFd,
    delay: Duration,
}

impl DelayTimer {
    /// Creates a timer that is stopped.
    ///
    /// # Errors
    /// The host has no free descriptors.
    pub(crate) fn new(delay: Duration) -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self {
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            // A timer value of zero would disarm the timer.
            delay: delay.max(Duration::from_nanos(1)),
        })
    }

    /// Starts the timer. It then stays expired until it is started again.
    ///
    /// # Errors
    /// The delay is too long.
    pub(crate) fn start(&self) -> io::Result<()> {
        let once = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec::try_from(self.delay).map_err(|_| io::ErrorKind::InvalidInput)?,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }

    /// Returns the source that is ready when the timer has expired.
    pub(crate) fn source(&self) -> PollSource<'_> {
        PollSource::readable(self.timer.as_fd())
    }
}
