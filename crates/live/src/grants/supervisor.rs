//! The supervisor: it decides by seccomp notification which system calls the mapping thread may
//! make.
//!
//! The mapping thread asks for work with the system call [`ASK`]. The supervisor writes a batch
//! of calls to the control region and completes `ASK`. It then expects exactly these calls, in
//! order and with these registers, and lets each continue. It allows no other call. The thread
//! makes one call at a time, so all calls have completed when it asks again.
//!
//! Every wait is limited (`wait.rs`), and so is the sum of the waits (`lateness.rs`).

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::call::Call;
use super::child::{ChildProcess, Waiter};
use super::control_region::{BATCH, ControlRegion};
use super::sys::{
    ASK, SeccompNotification, continue_call, install_fd, receive, return_value, set_sync_wakeup,
};
use super::wait::{LateThread, ThreadStatistics, Wait};
use crate::counters::DeviceCounters;

/// Protocol violation for which the daemon ends a process.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolViolation {
    /// The process exceeded the time limit of one wait.
    #[error("the process did not answer in time")]
    Late,
    /// The mapping thread exceeded the time limit of one answer.
    #[error("the process did not answer in time: {0}")]
    LateAnswer(LateThread),
    /// The process exceeded the limit on the sum of waits within a minute.
    #[error("the process did not answer in time: its delays exceed the limit for a minute")]
    AllowanceExceeded,
    /// The process has exited.
    #[error("the process has exited")]
    Exited,
    /// The mapping thread made a call that the daemon had not requested.
    #[error("the mapping thread made an unexpected system call: {0:x?}")]
    UnexpectedCall(Call),
    /// The process has unexpected threads or descriptors, or a thread without a filter.
    #[error("the process has unexpected threads or descriptors, or a thread without a filter")]
    Unconfined,
    /// A call came from a thread other than the mapping thread.
    #[error("a thread other than the mapping thread made a system call")]
    WrongThread,
    /// The kernel refused a requested call.
    #[error("the kernel refused to map or unmap: error {errno}")]
    Refused {
        /// Error number of the call.
        errno: u64,
    },
    /// The process sent a malformed message, or one that the protocol does not permit at that time.
    #[error("the process sent a malformed or unexpected message")]
    MalformedMessage,
    /// An I/O error in the daemon.
    #[error(transparent)]
    Io(io::Error),
}

impl From<io::Error> for ProtocolViolation {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Exited,
            _ => Self::Io(error),
        }
    }
}

/// The supervisor of one process.
#[derive(Debug)]
pub(crate) struct Supervisor {
    listener: OwnedFd,
    control: Arc<ControlRegion>,
    child: Arc<ChildProcess>,
    thread: u32,
    /// ID of the pending `ASK` call.
    idle: Option<u64>,
    statistics: ThreadStatistics,
    counters: Arc<DeviceCounters>,
}

impl Supervisor {
    /// Waits until `until` for the first `ASK` of the mapping thread.
    pub(crate) fn new(
        listener: OwnedFd,
        control: Arc<ControlRegion>,
        child: Arc<ChildProcess>,
        counters: Arc<DeviceCounters>,
        until: Instant,
    ) -> Result<Self, ProtocolViolation> {
        set_sync_wakeup(&listener);
        let mut supervisor = Self {
            listener,
            control,
            child,
            thread: 0,
            idle: None,
            statistics: ThreadStatistics::default(),
            counters,
        };
        let mut wait = Wait::at_most(until.saturating_duration_since(Instant::now()));
        let asked = supervisor.next(&mut wait)?;
        supervisor.thread = asked.thread;
        if asked.call.number != ASK {
            return Err(ProtocolViolation::UnexpectedCall(asked.call));
        }
        supervisor.statistics = ThreadStatistics::open(supervisor.child.pid(), asked.thread);
        supervisor.idle = Some(asked.id);
        Ok(supervisor)
    }

    pub(crate) fn child(&self) -> &Arc<ChildProcess> {
        &self.child
    }

    /// Makes the mapping thread execute `calls`. All have completed when this returns `Ok`.
    pub(crate) fn run(&mut self, calls: &[Call]) -> Result<(), ProtocolViolation> {
        calls.chunks(BATCH).try_for_each(|some| self.run_some(some))
    }

    fn run_some(&mut self, calls: &[Call]) -> Result<(), ProtocolViolation> {
        let count = u32::try_from(calls.len()).unwrap_or(u32::MAX);
        let mut wait = Wait::for_calls(count, self.child.patience(Waiter::Iommu));
        let done = self.make_all(calls, &mut wait);
        if !wait.is_late() {
            return done;
        }
        let late = wait.lateness(&self.statistics);
        let charged = self.child.charge(Waiter::Iommu, late);
        done?;
        charged.map_err(|_| ProtocolViolation::AllowanceExceeded)
    }

    fn make_all(&mut self, calls: &[Call], wait: &mut Wait) -> Result<(), ProtocolViolation> {
        let idle = self.idle.take().ok_or(ProtocolViolation::Exited)?;
        self.control.write_calls(calls);
        let count = i64::try_from(calls.len()).unwrap_or(0);
        self.check(return_value(&self.listener, idle, count))?;
        self.counters.rounds.add(1);
        for call in calls {
            let asked = self.next(wait)?;
            refused(&asked.call)?;
            if !call.has_same_effect(&asked.call) {
                return Err(ProtocolViolation::UnexpectedCall(asked.call));
            }
            self.check(continue_call(&self.listener, asked.id))?;
            self.counters.calls.add(1);
        }
        // The thread asks again, so the last call has completed too.
        let asked = self.next(wait)?;
        refused(&asked.call)?;
        let [done, ..] = asked.call.arguments;
        if asked.call.number != ASK || done != calls.len() as u64 {
            return Err(ProtocolViolation::UnexpectedCall(asked.call));
        }
        self.idle = Some(asked.id);
        Ok(())
    }

    /// Installs `file` in the process as descriptor `number`.
    pub(crate) fn give(&self, file: BorrowedFd<'_>, number: u32) -> Result<(), ProtocolViolation> {
        let idle = self.idle.ok_or(ProtocolViolation::Exited)?;
        self.check(install_fd(&self.listener, idle, file, number))
    }

    fn next(&self, wait: &mut Wait) -> Result<SeccompNotification, ProtocolViolation> {
        loop {
            let timeout = wait.next_poll(&self.statistics);
            let limit = Timespec::try_from(timeout).map_err(|_| ProtocolViolation::Late)?;
            let mut asks = [PollFd::new(&self.listener, PollFlags::IN)];
            let begun = Instant::now();
            let ready = poll(&mut asks, Some(&limit));
            let blocked = ready == Ok(0) && self.statistics.is_blocked();
            wait.add(timeout, begun.elapsed(), blocked);
            match ready {
                Ok(0) if timeout.is_zero() => {
                    return Err(ProtocolViolation::LateAnswer(wait.report(&self.statistics)));
                }
                // The thread may have lacked a CPU, so compute the limit again.
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(ProtocolViolation::Io(error.into())),
            }
            let [asks] = &asks;
            if !asks.revents().contains(PollFlags::IN) {
                return Err(ProtocolViolation::Exited);
            }
            let asked = self.check(receive(&self.listener))?;
            if self.thread != 0 && asked.thread != self.thread {
                return Err(ProtocolViolation::WrongThread);
            }
            return Ok(asked);
        }
    }

    /// Maps ENOENT to [`ProtocolViolation::Exited`]: the kernel returns it if the waiting thread is
    /// dead.
    fn check<T>(&self, result: io::Result<T>) -> Result<T, ProtocolViolation> {
        result.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => ProtocolViolation::Exited,
            _ => ProtocolViolation::Io(error),
        })
    }
}

/// Returns an error if the thread reports that the kernel refused a call.
fn refused(call: &Call) -> Result<(), ProtocolViolation> {
    match call.arguments {
        [_, errno, ..] if call.number == ASK && errno != 0 => {
            Err(ProtocolViolation::Refused { errno })
        }
        _ => Ok(()),
    }
}
