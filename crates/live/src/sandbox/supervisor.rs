//! The kernel's questions, answered: which calls the mapping thread may make.
//!
//! The thread waits in a call that asks for work. The supervisor writes the work down, lets that
//! call return, and then expects exactly these calls, in their order and with these registers; each
//! is let through, and nothing else ever is. When the thread asks again, all of them have been
//! made: one thread makes one call at a time.
//!
//! Every wait has an end, and so has their sum (`lateness.rs`). Neither counts the time in which
//! the thread could run and the host had no processor for it.

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

/// What a batch takes on a busy host: two switches between the processes, and the kernel's work on
/// each call. Only what takes longer is lateness.
const BATCH_ALLOWANCE: Duration = Duration::from_millis(1);
const CALL_ALLOWANCE: Duration = Duration::from_micros(200);

/// What a process did, or did not do, that ended it.
#[derive(Debug)]
pub enum ProtocolViolation {
    /// Not all was done in time.
    Late,
    /// Others waited too long for it, all waits of a minute together.
    AllowanceExceeded,
    /// It has gone.
    Exited,
    /// It asked for something else than what it was told to.
    UnexpectedCall(Call),
    /// It has threads or descriptors that it may not have, or a thread that may do anything.
    Unconfined,
    /// Another thread asked.
    WrongThread,
    /// The kernel refused what it was told to do.
    Refused {
        /// The number of the error.
        errno: u64,
    },
    /// Said what was not to be said then, or what is no message.
    MalformedMessage,
    /// What supervising it met.
    Io(io::Error),
}

impl std::fmt::Display for ProtocolViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Late => f.write_str("did not map or unmap in time"),
            Self::AllowanceExceeded => f.write_str(
                "did not map or unmap in time: others waited too long for it within a minute",
            ),
            Self::Exited => f.write_str("has gone"),
            Self::UnexpectedCall(call) => write!(f, "asked for what it was not told to: {call:x?}"),
            Self::Unconfined => f.write_str("did not confine itself"),
            Self::WrongThread => f.write_str("asked from a thread that may not"),
            Self::Refused { errno } => write!(f, "could not map or unmap: error {errno}"),
            Self::MalformedMessage => f.write_str("said what was not to be said"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ProtocolViolation {}

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
pub(super) struct Supervisor {
    listener: OwnedFd,
    control: Arc<ControlRegion>,
    child: Arc<ChildProcess>,
    thread: u32,
    /// The question that waits for work.
    idle: Option<u64>,
    /// The thread's scheduler statistics, where the kernel has them.
    scheduled: Option<File>,
    counters: Arc<DeviceCounters>,
}

/// One wait for the process, for several answers.
struct Wait {
    /// From then on it is late.
    late_after: Instant,
    /// Then it is ended.
    until: Instant,
    /// How long it had waited for a processor before it was late.
    queued: Option<Duration>,
}

impl Supervisor {
    /// Waits for the mapping thread's first question, until then.
    pub(super) fn new(
        listener: OwnedFd,
        board: Arc<ControlRegion>,
        life: Arc<ChildProcess>,
        counters: Arc<DeviceCounters>,
        until: Instant,
    ) -> Result<Self, ProtocolViolation> {
        set_sync_wakeup(&listener);
        let mut supervisor = Self {
            listener,
            control: board,
            child: life,
            thread: 0,
            idle: None,
            scheduled: None,
            counters,
        };
        let mut wait = Wait {
            late_after: until,
            until,
            queued: None,
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

    pub(super) fn child(&self) -> &Arc<ChildProcess> {
        &self.child
    }

    /// Has `calls` made. When it returns `Ok` they have been.
    pub(super) fn run(&mut self, calls: &[Call]) -> Result<(), ProtocolViolation> {
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
            queued: None,
        };
        let done = self.make_all(calls, &mut wait);
        let late = Instant::now().saturating_duration_since(wait.late_after);
        if late.is_zero() {
            return done;
        }
        let queued = self.queued().zip(wait.queued);
        let queued = queued.map(|(after, before)| after.saturating_sub(before));
        let late = late.saturating_sub(queued.unwrap_or_default());
        let charged = self.child.charge(Waiter::Iommu, late);
        done?;
        charged.map_err(|_| ProtocolViolation::AllowanceExceeded)
    }

    /// How long the mapping thread has waited for a processor so far: the second number of
    /// proc(5)'s `schedstat`, in nanoseconds.
    fn queued(&self) -> Option<Duration> {
        let mut text = [0; 64];
        let read = self.scheduled.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..read)?).ok()?;
        let nanoseconds = text.split_whitespace().nth(1)?.parse().ok()?;
        Some(Duration::from_nanos(nanoseconds))
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
        // It asks again, so the last call has been made as well.
        let asked = self.next(wait)?;
        refused(&asked.call)?;
        let [done, ..] = asked.call.arguments;
        if asked.call.number != ASK || done != calls.len() as u64 {
            return Err(ProtocolViolation::UnexpectedCall(asked.call));
        }
        self.idle = Some(asked.id);
        Ok(())
    }

    /// Gives the process `file` as descriptor `number`.
    pub(super) fn give(&self, file: BorrowedFd<'_>, number: u32) -> Result<(), ProtocolViolation> {
        let idle = self.idle.ok_or(ProtocolViolation::Exited)?;
        self.check(install_fd(&self.listener, idle, file, number))
    }

    fn next(&self, wait: &mut Wait) -> Result<SeccompNotification, ProtocolViolation> {
        loop {
            let now = Instant::now();
            let late = now >= wait.late_after;
            if late && wait.queued.is_none() {
                wait.queued = self.queued();
            }
            let until = if late { wait.until } else { wait.late_after };
            let left = until.saturating_duration_since(now);
            let left = Timespec::try_from(left).map_err(|_| ProtocolViolation::Late)?;
            let mut asks = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut asks, Some(&left)) {
                Ok(0) if late => return Err(ProtocolViolation::Late),
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

    /// Whoever waited has gone: so the kernel says.
    fn check<T>(&self, result: io::Result<T>) -> Result<T, ProtocolViolation> {
        result.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => ProtocolViolation::Exited,
            _ => ProtocolViolation::Io(error),
        })
    }
}

/// Whether the thread says that the kernel refused a call.
fn refused(call: &Call) -> Result<(), ProtocolViolation> {
    match call.arguments {
        [_, errno, ..] if call.number == ASK && errno != 0 => {
            Err(ProtocolViolation::Refused { errno })
        }
        _ => Ok(()),
    }
}
