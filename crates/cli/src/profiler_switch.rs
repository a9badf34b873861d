//! Settings of tracefs that a measurement changes. Its end restores them, and so does a signal.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::tracefs::Tracefs;

/// A measurement that does not run yet. Clones share its state, so a signal handler can end it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProfilerSwitch(Arc<Mutex<State>>);

/// Changes of a measurement.
#[derive(Debug, Default)]
struct State {
    /// Files to write at the end, and their contents, in the order of the changes.
    undo: Vec<(Arc<Tracefs>, &'static str, String)>,
    /// True if nothing may be changed any more.
    ended: bool,
}

impl ProfilerSwitch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes `value` to a file now and `undo` at the end. Does nothing after the end.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn change(
        &self,
        tracefs: &Arc<Tracefs>,
        name: &'static str,
        value: &str,
        undo: &str,
    ) -> io::Result<()> {
        let mut state = self.state();
        if state.ended {
            return Ok(());
        }
        // A write that fails may have had an effect.
        let undo = (Arc::clone(tracefs), name, undo.to_owned());
        state.undo.push(undo);
        tracefs.write(name, value)
    }

    /// Restores the files, the last change first. Nothing is changed later.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.ended = true;
        for (tracefs, name, value) in state.undo.drain(..).rev() {
            // Errors cannot be reported here.
            let _ = tracefs.write(name, &value);
        }
    }
}
