//! Keeps a CPU busy with a counting loop while no other thread needs it, so that it never halts.
//!
//! The host wakes a halted CPU late, and the guest's clock may jump in between. A spinning CPU is
//! interrupted inside a loop whose iterations all take the same time. The CPU time of other work is
//! therefore the elapsed time less the time of the iterations.

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Time in which the iterations are calibrated. A kernel tick within it disappears in the rounding.
const MEASURED: Duration = Duration::from_millis(20);

/// A thread that spins on this thread's CPU while the CPU is otherwise idle. Dropping the value
/// stops it.
#[derive(Debug)]
pub(super) struct IdleSpinner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Nanoseconds per iteration.
    turn: u64,
}

#[derive(Debug, Default)]
struct Shared {
    turns: AtomicU64,
    stop: AtomicBool,
}

impl IdleSpinner {
    /// Binds this thread to one CPU, starts the spinning thread there, and measures its iteration
    /// time.
    ///
    /// # Errors
    /// The kernel refused an operation.
    pub(super) fn start() -> io::Result<Self> {
        let mut one = CpuSet::new();
        one.set(rustix::thread::sched_getcpu());
        sched_setaffinity(None, &one)?;
        let shared = Arc::new(Shared::default());
        let (theirs, (sender, receiver)) = (Arc::clone(&shared), std::sync::mpsc::channel());
        let thread = thread::Builder::new().spawn(move || {
            let idle = become_idle();
            let begun = idle.is_ok();
            let _ = sender.send(idle);
            let mut turns = 0_u64;
            while begun && !theirs.stop.load(Ordering::Relaxed) {
                turns = turns.wrapping_add(1);
                theirs.turns.store(turns, Ordering::Relaxed);
            }
        })?;
        let mut beside = Self {
            shared,
            thread: Some(thread),
            turn: 1,
        };
        receiver.recv().map_err(|_| io::ErrorKind::BrokenPipe)??;
        let (begun, before) = (Instant::now(), beside.turns());
        thread::sleep(MEASURED);
        let turns = beside.turns().wrapping_sub(before).max(1);
        let took = nanoseconds(begun.elapsed());
        beside.turn = took.saturating_add(turns / 2) / turns;
        Ok(beside)
    }

    /// Returns a spinner without a thread, whose iterations take `turn` nanoseconds.
    #[cfg(test)]
    pub(super) fn of_turn(turn: u64) -> Self {
        Self {
            shared: Arc::default(),
            thread: None,
            turn,
        }
    }

    /// Returns the number of iterations so far.
    pub(super) fn turns(&self) -> u64 {
        self.shared.turns.load(Ordering::Relaxed)
    }

    /// Returns the nanoseconds that `turns` iterations take.
    pub(super) fn time(&self, turns: u64) -> u64 {
        turns.saturating_mul(self.turn)
    }
}

impl Drop for IdleSpinner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns `time` in nanoseconds.
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Makes this thread run only while no other thread wants the CPU.
fn become_idle() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel only reads the parameters, which outlive the call.
    let code = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) };
    if code == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
