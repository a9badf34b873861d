//! What a processor does while nobody else wants it: turns of a loop, counted, in place of its
//! rest.
//!
//! A processor that rests is woken when the host gets round to it, and its clock may have jumped
//! meanwhile. One that turns is interrupted in a loop whose every turn takes the same time, so that
//! what it did beside the turns can be told: time less turns.

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

/// How long the thread that measures a turn stays away; a tick of the kernel's meanwhile is lost in
/// the rounding.
const MEASURED: Duration = Duration::from_millis(20);

/// A thread that runs on this thread's processor while that has nothing else to do; it ends with
/// this value.
#[derive(Debug)]
pub(super) struct IdleSpinner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Nanoseconds of a turn.
    turn: u64,
}

#[derive(Debug, Default)]
struct Shared {
    turns: AtomicU64,
    stop: AtomicBool,
}

impl IdleSpinner {
    /// Binds this thread to one processor, starts the other there, and measures how long its turn
    /// is.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub(super) fn start() -> io::Result<Self> {
        let mut one = CpuSet::new();
        one.set(rustix::thread::sched_getcpu());
        sched_setaffinity(None, &one)?;
        let shared = Arc::new(Shared::default());
        let (theirs, (tell, told)) = (Arc::clone(&shared), std::sync::mpsc::channel());
        let thread = thread::Builder::new().spawn(move || {
            let idle = become_idle();
            let begun = idle.is_ok();
            let _ = tell.send(idle);
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
        told.recv().map_err(|_| io::ErrorKind::BrokenPipe)??;
        let (begun, before) = (Instant::now(), beside.turns());
        thread::sleep(MEASURED);
        let turns = beside.turns().wrapping_sub(before).max(1);
        let took = nanoseconds(begun.elapsed());
        beside.turn = took.saturating_add(turns / 2) / turns;
        Ok(beside)
    }

    /// How many turns there have been.
    pub(super) fn turns(&self) -> u64 {
        self.shared.turns.load(Ordering::Relaxed)
    }

    /// Nanoseconds that so many turns take.
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

/// `time` in nanoseconds.
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// From now on this thread runs only while no other wants to, and gives way at once.
fn become_idle() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the parameters, which live until the call is over; nothing else is
    // touched.
    let code = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) };
    if code == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
