//! The supervisor: it decides by seccomp notification which system calls the mapping thread may
//! make.
//!
//! The mapping thread asks for work with the system call [`ASK`]. The supervisor writes a batch
//! of calls to the control region and completes `ASK`. It then expects exactly these calls, in
//! order and with these registers, and lets each continue. It allows no other call. The thread
//! makes one call at a time, so all calls have completed when it asks again.
//!
//! Every wait is limited, and so is the sum of the waits (`lateness.rs`). Both limits exclude time
//! in which the late thread was runnable but had no CPU, unless the thread uses the CPU for more
//! than its work: a thread that spins waits for the CPU again and again, on a busy host nine tenths
//! of the time. [`LONGEST_ELAPSED`] includes all time.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::call::Call;
use super::child::{ChildProcess, Waiter};
use super::control_region::{BATCH, ControlRegion};
use super::lateness::LONGEST;
use super::sys::{
    ASK, SeccompNotification, continue_call, install_fd, receive, return_value, set_sync_wakeup,
};
use crate::counters::DeviceCounters;

/// Time for a batch on a busy host: two context switches and the kernel's work on each call. Only
/// time beyond this allowance counts as lateness.
const BATCH_ALLOWANCE: Duration = Duration::from_millis(1);
const CALL_ALLOWANCE: Duration = Duration::from_micros(200);
/// CPU time, in addition to that of its batch, for which a late thread may run. Beyond it, its time
/// on the run queue counts as lateness.
const RUN_ALLOWANCE: Duration = Duration::from_millis(10);
/// Longest wait for one answer on a host that has no CPU for the thread. A process has two threads,
/// so it cannot keep itself off the CPU for more than half of the time.
const LONGEST_ELAPSED: Duration = Duration::from_secs(5);

/// Protocol violation for which the daemon ends a process.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolViolation {
    /// The process exceeded the time limit of one wait.
    #[error("the process did not answer in time")]
    Late,
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
    /// The thread's scheduler statistics; `None` if the kernel has none.
    scheduled: Option<File>,
    counters: Arc<DeviceCounters>,
}

/// One wait for the process, which may cover several answers.
struct Wait {
    /// Time after which the process is late.
    late_after: Instant,
    /// Time at which the wait fails, without time on the run queue.
    until: Instant,
    /// Time at which the wait fails in any case.
    ends: Instant,
    /// CPU time that a thread which does only its work stays below once it is late.
    may_run: Duration,
    /// Statistics of the thread when the process became late.
    at_late: Option<Scheduled>,
}

/// Scheduler statistics of a thread since its start.
#[derive(Clone, Copy, Debug, Default)]
struct Scheduled {
    /// Time on a CPU.
    ran: Duration,
    /// Time runnable without a CPU.
    queued: Duration,
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
            scheduled: None,
            counters,
        };
        let mut wait = Wait {
            late_after: until,
            until,
            ends: until,
            may_run: RUN_ALLOWANCE,
            at_late: None,
        };
        let asked = supervisor.next(&mut wait)?;
        supervisor.thread = asked.thread;
        if asked.call.number != ASK {
            return Err(ProtocolViolation::UnexpectedCall(asked.call));
        }
        let (process, thread) = (supervisor.child.pid(), asked.thread);
        let statistics = format!("/proc/{process}/task/{thread}/schedstat");
        supervisor.scheduled = File::open(statistics).ok();
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
        let begun = Instant::now();
        let free = BATCH_ALLOWANCE.saturating_add(CALL_ALLOWANCE.saturating_mul(count));
        let patience = self.child.patience(Waiter::Iommu).min(LONGEST);
        let mut wait = Wait {
            late_after: begun + free,
            until: begun + free + patience,
            ends: begun + free + LONGEST_ELAPSED,
            may_run: free + RUN_ALLOWANCE,
            at_late: None,
        };
        let done = self.make_all(calls, &mut wait);
        let late = Instant::now().saturating_duration_since(wait.late_after);
        if late.is_zero() {
            return done;
        }
        let late = late.saturating_sub(self.queued_since_late(&wait));
        let charged = self.child.charge(Waiter::Iommu, late);
        done?;
        charged.map_err(|_| ProtocolViolation::AllowanceExceeded)
    }

    /// Returns the scheduler statistics of the mapping thread: the first two numbers of `schedstat`
    /// (proc(5)), in nanoseconds. The kernel adds a wait when it has ended.
    fn scheduled(&self) -> Option<Scheduled> {
        let mut text = [0; 64];
        let read = self.scheduled.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..read)?).ok()?;
        let mut words = text.split_whitespace();
        let mut next = || Some(Duration::from_nanos(words.next()?.parse().ok()?));
        Some(Scheduled {
            ran: next()?,
            queued: next()?,
        })
    }

    /// Returns the time that the mapping thread has spent on the run queue since it became late.
    /// Zero if it has used the CPU for more than its work since then.
    fn queued_since_late(&self, wait: &Wait) -> Duration {
        match (self.scheduled(), wait.at_late) {
            (Some(now), Some(then)) if now.ran.saturating_sub(then.ran) <= wait.may_run => {
                now.queued.saturating_sub(then.queued)
            }
            _ => Duration::ZERO,
        }
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
            if !call.is(&asked.call) {
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
            let now = Instant::now();
            let late = now >= wait.late_after;
            if late && wait.at_late.is_none() {
                wait.at_late = self.scheduled();
            }
            let until = if late {
                let queued = self.queued_since_late(wait).min(LONGEST_ELAPSED);
                (wait.until + queued).min(wait.ends)
            } else {
                wait.late_after
            };
            let left = until.saturating_duration_since(now);
            let expired = late && left.is_zero();
            let left = Timespec::try_from(left).map_err(|_| ProtocolViolation::Late)?;
            let mut asks = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut asks, Some(&left)) {
                Ok(0) if expired => return Err(ProtocolViolation::Late),
                // The thread may have been on the run queue, so compute the limit again.
                Ok(0) => continue,
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// Waits for a thread that never answers and has been on the run queue for `queued` since it
    /// became late. Returns the time until the wait failed.
    fn wait_for_silent_thread(patience: Duration, ends: Duration, queued: Duration) -> Duration {
        wait_for_thread_that_ran(patience, ends, queued, Duration::ZERO)
    }

    /// Like [`wait_for_silent_thread`], for a thread that also ran for `ran`.
    fn wait_for_thread_that_ran(
        patience: Duration,
        ends: Duration,
        queued: Duration,
        ran: Duration,
    ) -> Duration {
        let child = Command::new("/bin/sleep").arg("600").spawn().unwrap();
        let mut scheduled = tempfile::tempfile().unwrap();
        writeln!(scheduled, "{} {} 1", ran.as_nanos(), queued.as_nanos()).unwrap();
        // The listener never becomes readable: the other end stays open and sends nothing.
        let (listener, _silent) = rustix::pipe::pipe().unwrap();
        let supervisor = Supervisor {
            listener,
            control: Arc::new(ControlRegion::create().unwrap()),
            child: Arc::new(ChildProcess::new(child).unwrap()),
            thread: 0,
            idle: None,
            scheduled: Some(scheduled),
            counters: Arc::default(),
        };
        let begun = Instant::now();
        let mut wait = Wait {
            late_after: begun,
            until: begun + patience,
            ends: begun + ends,
            may_run: RUN_ALLOWANCE,
            at_late: Some(Scheduled::default()),
        };
        let error = supervisor.next(&mut wait).unwrap_err();
        assert!(matches!(error, ProtocolViolation::Late), "{error}");
        begun.elapsed()
    }

    #[test]
    fn a_wait_excludes_time_without_a_cpu() {
        assert!(wait_for_silent_thread(MS(20), MS(60_000), MS(0)) >= MS(20));
        let waited = wait_for_silent_thread(MS(20), MS(60_000), MS(500));
        assert!(waited >= MS(520), "{waited:?}");
    }

    /// A thread that spins on a busy host waits for the CPU most of the time.
    #[test]
    fn a_thread_that_spins_gets_no_time_for_the_run_queue() {
        let waited = wait_for_thread_that_ran(MS(20), MS(60_000), MS(5000), MS(11));
        assert!(waited < MS(5000), "{waited:?}");
        let waited = wait_for_thread_that_ran(MS(20), MS(60_000), MS(500), MS(9));
        assert!(waited >= MS(520), "{waited:?}");
    }

    #[test]
    fn a_wait_ends_even_without_a_cpu() {
        let hour = Duration::from_secs(3600);
        let waited = wait_for_silent_thread(MS(20), MS(200), hour);
        assert!(waited >= MS(200), "{waited:?}");
        assert!(waited < LONGEST_ELAPSED, "{waited:?}");
    }
}
