//! Ctrl-C while guests run: they end, and what was counted before is kept.

use std::io;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::interrupt::{Then, on_interrupt};

/// What a process shares with whoever may end it.
type Shared = Arc<Mutex<Child>>;

/// Whether to stop, and what runs until then.
#[derive(Debug, Default)]
pub(super) struct Stop {
    asked: AtomicBool,
    over: AtomicBool,
    running: Mutex<Vec<Shared>>,
}

impl Stop {
    /// Whether it was asked for.
    pub(super) fn asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// Ends what runs, and whatever would begin to.
    pub(super) fn ask(&self) {
        self.asked.store(true, Ordering::SeqCst);
        for child in lock(&self.running).iter() {
            let _ = lock(child).kill();
        }
    }

    /// Has Ctrl-C ask for it; once a process. After [`over`](Self::over) it ends this process, as without.
    pub(super) fn at_ctrl_c(self: &Arc<Self>) -> io::Result<()> {
        let stop = Arc::clone(self);
        let handler = move || {
            if stop.over.load(Ordering::SeqCst) {
                return Then::End;
            }
            stop.ask();
            Then::GoOn
        };
        on_interrupt(handler)
    }

    /// There is nothing more to keep.
    pub(super) fn over(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    /// Takes a process that has just begun.
    pub(super) fn guard(&self, child: Child) -> Running<'_> {
        let child = Arc::new(Mutex::new(child));
        lock(&self.running).push(Arc::clone(&child));
        // Whoever asked before did not see it.
        if self.asked() {
            let _ = lock(&child).kill();
        }
        Running { child, stop: self }
    }
}

/// A process that ends when it is asked to stop.
#[derive(Debug)]
pub(super) struct Running<'a> {
    child: Shared,
    stop: &'a Stop,
}

impl Running<'_> {
    /// Waits for its end, which is near: it has closed its output, or is ended here.
    pub(super) fn end(self, now: bool) -> io::Result<ExitStatus> {
        let mut child = lock(&self.child);
        if now {
            let _ = child.kill();
        }
        child.wait()
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        lock(&self.stop.running).retain(|one| !Arc::ptr_eq(one, &self.child));
    }
}

/// What is behind it is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn what_runs_is_ended_and_what_would_begin_too() {
        let stop = Stop::default();
        let sleeps = || stop.guard(Command::new("sleep").arg("600").spawn().unwrap());
        let before = sleeps();
        stop.ask();
        let after = sleeps();
        assert!(stop.asked());
        for running in [before, after] {
            assert!(!running.end(false).unwrap().success());
        }
        assert!(lock(&stop.running).is_empty());
    }
}
