//! Handles Ctrl-C while guests run: kills them and keeps earlier counts.

use std::io;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::interrupt::{AfterSignal, on_interrupt};

/// A process, shared with the thread that may kill it.
type SharedChild = Arc<Mutex<Child>>;

/// A stop request, and the running processes.
#[derive(Debug, Default)]
pub(super) struct Interrupt {
    requested: AtomicBool,
    finished: AtomicBool,
    running: Mutex<Vec<SharedChild>>,
}

impl Interrupt {
    /// Returns true if a stop was requested.
    pub(super) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Kills all running processes, and those that start later.
    pub(super) fn request(&self) {
        self.requested.store(true, Ordering::SeqCst);
        for child in lock(&self.running).iter() {
            let _ = lock(child).kill();
        }
    }

    /// Installs a Ctrl-C handler that requests the stop; call once per process. After
    /// [`finish`](Self::finish), Ctrl-C ends this process, as it does without the handler.
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

    /// Ends the phase in which Ctrl-C keeps the counts.
    pub(super) fn finish(&self) {
        self.finished.store(true, Ordering::SeqCst);
    }

    /// Registers a process that has just started.
    pub(super) fn guard(&self, child: Child) -> GuardedChild<'_> {
        let child = Arc::new(Mutex::new(child));
        lock(&self.running).push(Arc::clone(&child));
        // An earlier request did not see this process.
        if self.is_requested() {
            let _ = lock(&child).kill();
        }
        GuardedChild { child, stop: self }
    }
}

/// A process that is killed at a stop request.
#[derive(Debug)]
pub(super) struct GuardedChild<'a> {
    child: SharedChild,
    stop: &'a Interrupt,
}

impl GuardedChild<'_> {
    /// Waits for the end of the process. It is near: the process has closed its output, or `now`
    /// kills it.
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

/// Locks a mutex. A panic of another holder leaves the contents consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn interrupt_ends_running_and_later_commands() {
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
