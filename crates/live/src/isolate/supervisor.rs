//! The kernel's questions, answered: which calls the mapping thread may make.
//!
//! The thread waits in a call that asks for work. The supervisor writes the work down, lets that call return, and then expects exactly these calls, in their
//! order and with these registers; each is let through, and nothing else ever is. When the thread asks again, all of them have been made: one thread makes
//! one call at a time.
//!
//! Every wait has an end, and so has their sum (`lateness.rs`). Neither counts the time in which the
//! thread could run and the host had no processor for it.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::board::{BATCH, Board};
use super::call::Call;
use super::lateness::LONGEST;
use super::life::{Life, Waits};
use super::sys::{ASK, Asked, answer, give, let_through, receive, wake_at_once};
use crate::counters::DeviceCounters;

/// What a batch takes on a busy host: two switches between the processes, and the kernel's work on
/// each call. Only what takes longer is lateness.
const FREE: Duration = Duration::from_millis(1);
const FREE_FOR_A_CALL: Duration = Duration::from_micros(200);

/// What a process did, or did not do, that ended it.
#[derive(Debug)]
pub enum Breach {
    /// Not all was done in time.
    Late,
    /// Others waited too long for it, all waits of a minute together.
    LateInAll,
    /// It has gone.
    Gone,
    /// It asked for something else than what it was told to.
    Other(Call),
    /// It has threads or descriptors that it may not have, or a thread that may do anything.
    Unconfined,
    /// Another thread asked.
    Stranger,
    /// The kernel refused what it was told to do.
    Refused {
        /// The number of the error.
        errno: u64,
    },
    /// Said what was not to be said then, or what is no message.
    Protocol,
    /// What supervising it met.
    Io(io::Error),
}

impl std::fmt::Display for Breach {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Late => f.write_str("did not map or unmap in time"),
            Self::LateInAll => f.write_str(
                "did not map or unmap in time: others waited too long for it within a minute",
            ),
            Self::Gone => f.write_str("has gone"),
            Self::Other(call) => write!(f, "asked for what it was not told to: {call:x?}"),
            Self::Unconfined => f.write_str("did not confine itself"),
            Self::Stranger => f.write_str("asked from a thread that may not"),
            Self::Refused { errno } => write!(f, "could not map or unmap: error {errno}"),
            Self::Protocol => f.write_str("said what was not to be said"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Breach {}

impl From<io::Error> for Breach {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Gone,
            _ => Self::Io(error),
        }
    }
}

/// The supervisor of one process.
#[derive(Debug)]
pub(super) struct Supervisor {
    listener: OwnedFd,
    board: Arc<Board>,
    life: Arc<Life>,
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
    free_until: Instant,
    /// Then it is ended.
    until: Instant,
    /// How long it had waited for a processor before it was late.
    queued: Option<Duration>,
}

impl Supervisor {
    /// Waits for the mapping thread's first question, until then.
    pub(super) fn new(
        listener: OwnedFd,
        board: Arc<Board>,
        life: Arc<Life>,
        counters: Arc<DeviceCounters>,
        until: Instant,
    ) -> Result<Self, Breach> {
        wake_at_once(&listener);
        let mut supervisor = Self {
            listener,
            board,
            life,
            thread: 0,
            idle: None,
            scheduled: None,
            counters,
        };
        let mut wait = Wait {
            free_until: until,
            until,
            queued: None,
        };
        let asked = supervisor.next(&mut wait)?;
        supervisor.thread = asked.thread;
        if asked.call.number != ASK {
            return Err(Breach::Other(asked.call));
        }
        let (process, thread) = (supervisor.life.number(), asked.thread);
        let statistics = format!("/proc/{process}/task/{thread}/schedstat");
        supervisor.scheduled = File::open(statistics).ok();
        supervisor.idle = Some(asked.id);
        Ok(supervisor)
    }

    pub(super) fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// Has `calls` made. When it returns `Ok` they have been.
    pub(super) fn run(&mut self, calls: &[Call]) -> Result<(), Breach> {
        calls.chunks(BATCH).try_for_each(|some| self.run_some(some))
    }

    fn run_some(&mut self, calls: &[Call]) -> Result<(), Breach> {
        let count = u32::try_from(calls.len()).unwrap_or(u32::MAX);
        let begun = Instant::now();
        let free = FREE.saturating_add(FREE_FOR_A_CALL.saturating_mul(count));
        let patience = self.life.patience(Waits::Iommu).min(LONGEST);
        let mut wait = Wait {
            free_until: begun + free,
            until: begun + free + patience,
            queued: None,
        };
        let done = self.make_all(calls, &mut wait);
        let late = Instant::now().saturating_duration_since(wait.free_until);
        if late.is_zero() {
            return done;
        }
        let queued = self.queued().zip(wait.queued);
        let queued = queued.map(|(after, before)| after.saturating_sub(before));
        let late = late.saturating_sub(queued.unwrap_or_default());
        let charged = self.life.charge(Waits::Iommu, late);
        done?;
        charged.map_err(|_| Breach::LateInAll)
    }

    /// How long the mapping thread has waited for a processor so far: the second number of proc(5)'s
    /// `schedstat`, in nanoseconds.
    fn queued(&self) -> Option<Duration> {
        let mut text = [0; 64];
        let read = self.scheduled.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..read)?).ok()?;
        let nanoseconds = text.split_whitespace().nth(1)?.parse().ok()?;
        Some(Duration::from_nanos(nanoseconds))
    }

    fn make_all(&mut self, calls: &[Call], wait: &mut Wait) -> Result<(), Breach> {
        let idle = self.idle.take().ok_or(Breach::Gone)?;
        self.board.post(calls);
        let count = i64::try_from(calls.len()).unwrap_or(0);
        self.check(answer(&self.listener, idle, count))?;
        self.counters.rounds.add(1);
        for call in calls {
            let asked = self.next(wait)?;
            refused(&asked.call)?;
            if !call.is(&asked.call) {
                return Err(Breach::Other(asked.call));
            }
            self.check(let_through(&self.listener, asked.id))?;
            self.counters.calls.add(1);
        }
        // It asks again, so the last call has been made as well.
        let asked = self.next(wait)?;
        refused(&asked.call)?;
        let [done, ..] = asked.call.arguments;
        if asked.call.number != ASK || done != calls.len() as u64 {
            return Err(Breach::Other(asked.call));
        }
        self.idle = Some(asked.id);
        Ok(())
    }

    /// Gives the process `file` as descriptor `number`.
    pub(super) fn give(&self, file: BorrowedFd<'_>, number: u32) -> Result<(), Breach> {
        let idle = self.idle.ok_or(Breach::Gone)?;
        self.check(give(&self.listener, idle, file, number))
    }

    fn next(&self, wait: &mut Wait) -> Result<Asked, Breach> {
        loop {
            let now = Instant::now();
            let late = now >= wait.free_until;
            if late && wait.queued.is_none() {
                wait.queued = self.queued();
            }
            let until = if late { wait.until } else { wait.free_until };
            let left = until.saturating_duration_since(now);
            let left = Timespec::try_from(left).map_err(|_| Breach::Late)?;
            let mut asks = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut asks, Some(&left)) {
                Ok(0) if late => return Err(Breach::Late),
                Ok(0) => continue,
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(Breach::Io(error.into())),
            }
            let [asks] = &asks;
            if !asks.revents().contains(PollFlags::IN) {
                return Err(Breach::Gone);
            }
            let asked = self.check(receive(&self.listener))?;
            if self.thread != 0 && asked.thread != self.thread {
                return Err(Breach::Stranger);
            }
            return Ok(asked);
        }
    }

    /// Whoever waited has gone: so the kernel says.
    fn check<T>(&self, result: io::Result<T>) -> Result<T, Breach> {
        result.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => Breach::Gone,
            _ => Breach::Io(error),
        })
    }
}

/// Whether the thread says that the kernel refused a call.
fn refused(call: &Call) -> Result<(), Breach> {
    match call.arguments {
        [_, errno, ..] if call.number == ASK && errno != 0 => Err(Breach::Refused { errno }),
        _ => Ok(()),
    }
}
