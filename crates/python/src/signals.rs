//! Runs work without the interpreter's lock, and ends it at a signal.
//!
//! The interpreter only notes a signal. The signal's handler runs when the main thread checks for
//! signals. Readers and replays check between chunks and modes, through an [`Interrupt`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use ringfence_trace::Interrupt;

use crate::error::Failure;

/// Shortest time between two checks. A check may wait for the interpreter's lock for 5 ms, the
/// switch interval of its threads.
const INTERVAL: Duration = Duration::from_millis(50);

/// The signals of one call.
#[derive(Debug)]
pub(crate) struct Signals {
    /// The thread that made the call. Only this thread checks for signals. Another thread would
    /// wait for the interpreter's lock, whose holder may wait for that thread.
    thread: ThreadId,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    checked: Instant,
    /// The exception that a handler raised.
    raised: Option<PyErr>,
}

impl Signals {
    /// Creates the signals of a call by this thread.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            thread: thread::current().id(),
            state: Mutex::new(State {
                checked: Instant::now(),
                raised: None,
            }),
        })
    }

    /// Returns the interrupt that is set once a handler has raised an exception.
    pub(crate) fn interrupt(self: &Arc<Self>) -> Interrupt {
        let signals = Arc::clone(self);
        Interrupt::new(move || signals.check())
    }

    /// Runs the handlers of pending signals. Returns true if one has raised an exception.
    pub(crate) fn check(&self) -> bool {
        if thread::current().id() != self.thread {
            return false;
        }
        {
            let mut state = self.state();
            if state.raised.is_some() {
                return true;
            }
            if state.checked.elapsed() < INTERVAL {
                return false;
            }
            state.checked = Instant::now();
        }
        // A handler is any Python code, which may come back here.
        let raised = Python::attach(|py| py.check_signals()).err();
        let mut state = self.state();
        if raised.is_some() {
            state.raised = raised;
        }
        state.raised.is_some()
    }

    /// Returns the exception that a handler raised.
    pub(crate) fn take(&self) -> Option<PyErr> {
        self.state().raised.take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `work` without the interpreter's lock.
///
/// # Errors
/// The exception of a signal's handler, or the error of `work`.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Arc<Signals>) -> Result<T, Failure> + Send,
) -> PyResult<T> {
    let signals = Signals::new();
    let done = py.detach(|| work(&signals));
    match signals.take() {
        Some(raised) => Err(raised),
        None => done.map_err(PyErr::from),
    }
}
