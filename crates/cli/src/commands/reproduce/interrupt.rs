//! Ctrl-C while guests run: they end, and what was counted before is kept.

use std::io;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::interrupt::{AfterSignal, on_interrupt};

/// What a process shares with whoever may end it.
type SharedChild = Arc<Mutex<Child>>;

/// Whether to stop, and what runs until then.
#[derive(Debug, Default)]
pub(super) struct Interrupt {
    requested: AtomicBool,
    finished: AtomicBool,
    running: Mutex<Vec<SharedChild>>,
}

impl Interrupt {
    /// Whether it was asked for.
    pub(super) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Ends what runs, and whatever would begin to.
    pub(super) fn request(&self) {
        self.requested.store(true, Ordering::SeqCst);
        for child in lock(&self.running).iter() {
            let _ = lock(child).kill();
        }
    }

    /// Has Ctrl-C ask for it; once a process. After [`finish`](Self::finish) it ends this process,
    /// as without.
    pub(super) fn install_handler(self: &Arc<Self>) -> io::Result<()> {
        let stop = Arc::clone(self);
        let handler = move || {
            if stop.finished.load(Ordering::SeqCst) {
                return AfterSignal::End;
            }
            stop.request();
            AfterSignal::GoOn
        };
        on_interrupt(handler)
    }

    /// There is nothing more to keep.
    pub(super) fn finish(&self) {
        self.finished.store(true, Ordering::SeqCst);
    }

    /// Takes a process that has just begun.
    pub(super) fn guard(&self, child: Child) -> GuardedChild<'_> {
        let child = Arc::new(Mutex::new(child));
        lock(&self.running).push(Arc::clone(&child));
        // Whoever asked before did not see it.
        if self.is_requested() {
            let _ = lock(&child).kill();
        }
        GuardedChild { child, stop: self }
    }
}

/// A process that ends when it is asked to stop.
#[derive(Debug)]
pub(super) struct GuardedChild<'a> {
    child: SharedChild,
    stop: &'a Interrupt,
}

impl GuardedChild<'_> {
    /// Waits for its end, which is near: it has closed its output, or is ended here.
    pub(super) fn end(self, now: bool) -> io::Result<ExitStatus> {
        let mut child = lock(&self.child);
        if now {
            let _ = child.kill();
        }
        child.wait()
    }
}

impl Drop for GuardedChild<'_> {
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
        let stop = Interrupt::default();
        let sleeps = || stop.guard(Command::new("sleep").arg("600").spawn().unwrap());
        let before = sleeps();
        stop.request();
        let after = sleeps();
        assert!(stop.is_requested());
        for running in [before, after] {
            assert!(!running.end(false).unwrap().success());
        }
        assert!(lock(&stop.running).is_empty());
    }
}
