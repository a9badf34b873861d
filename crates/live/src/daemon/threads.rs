//! Threads of the daemon. The log has an error of a thread as soon as it ends the thread: nobody
//! may wait for the thread yet.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::Log;
use crate::server::ServeEvent;

/// The threads, in the order of their start.
pub(super) struct Threads {
    log: Log,
    handles: Vec<JoinHandle<()>>,
    /// The first error in the log.
    first_error: Arc<Mutex<Option<io::Error>>>,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Threads({})", self.handles.len())
    }
}

impl Threads {
    pub(super) fn new(log: &Log) -> Self {
        Self {
            log: Arc::clone(log),
            handles: Vec::new(),
            first_error: Arc::default(),
        }
    }

    /// Starts a thread. `name` is its name in the log and for the kernel.
    ///
    /// # Errors
    /// The kernel has no resources for a thread. `run` is dropped.
    pub(super) fn spawn(
        &mut self,
        name: &'static str,
        run: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let (log, first_error) = (Arc::clone(&self.log), Arc::clone(&self.first_error));
        let builder = thread::Builder::new().name(name.to_owned());
        let started = builder.spawn(move || {
            // A panic has dropped what the thread used.
            let ended = catch_unwind(AssertUnwindSafe(run))
                .unwrap_or_else(|_| Err(io::Error::other("the thread panicked")));
            if let Err(error) = ended {
                // The lock keeps the first error and the first line of the log the same one.
                let mut first_error = first_error.lock().unwrap_or_else(PoisonError::into_inner);
                log(name, &ServeEvent::Failed(&error));
                first_error.get_or_insert(error);
            }
        });
        self.handles.push(started.map_err(|error| {
            io::Error::new(error.kind(), format!("cannot start thread {name}: {error}"))
        })?);
        Ok(())
    }

    /// Waits until every thread has ended.
    ///
    /// # Errors
    /// The first error in the log.
    pub(super) fn join(self) -> io::Result<()> {
        for handle in self.handles {
            // The log has its panic.
            let _ = handle.join();
        }
        let mut first_error = self
            .first_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        first_error.take().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// A log whose lines a test reads, and threads that write to it.
    fn logged() -> (Threads, Receiver<String>) {
        let (line, lines) = channel();
        let line = Mutex::new(line);
        let log: Log = Arc::new(move |name, event| {
            if let ServeEvent::Failed(error) = event {
                line.lock()
                    .unwrap()
                    .send(format!("{name}: {error}"))
                    .unwrap();
            }
        });
        (Threads::new(&log), lines)
    }

    /// The first thread ends last, and the log has the second one's error before.
    #[test]
    fn an_error_is_seen_while_other_threads_run() {
        let (mut threads, lines) = logged();
        let (stop, stopped) = channel::<()>();
        let first = threads.spawn("blk", move || {
            let _ = stopped.recv();
            Err(io::Error::other("stopped"))
        });
        first.unwrap();
        let second = threads.spawn("metrics.sock", || Err(io::Error::other("no poll")));
        second.unwrap();
        assert_eq!(lines.recv().unwrap(), "metrics.sock: no poll");
        drop(stop);
        assert_eq!(threads.join().unwrap_err().to_string(), "no poll");
        assert_eq!(lines.recv().unwrap(), "blk: stopped");
    }

    #[test]
    fn a_panic_is_an_error() {
        let (mut threads, lines) = logged();
        threads.spawn("net", || panic!("in a test")).unwrap();
        threads.spawn("rng", || Ok(())).unwrap();
        assert_eq!(
            threads.join().unwrap_err().to_string(),
            "the thread panicked"
        );
        assert_eq!(lines.recv().unwrap(), "net: the thread panicked");
    }

    #[test]
    fn no_error_is_no_error() {
        let (mut threads, lines) = logged();
        threads.spawn("rng", || Ok(())).unwrap();
        assert!(threads.join().is_ok());
        assert!(lines.recv().is_err());
    }
}
