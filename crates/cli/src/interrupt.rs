//! Handles Ctrl-C, SIGTERM and SIGHUP: runs the command's action and removes temporary files.
//!
//! The process has one handler. It runs the command's own action, if one is set. Otherwise it
//! removes the temporary files and directories and ends the process. A command that continues may
//! block, for example on a reader of its output. The third signal therefore ends it in any case.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Exit code after a signal.
pub(crate) const INTERRUPTED: u8 = 130;

/// Behaviour after a command's action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterSignal {
    /// The command ends by itself soon.
    GoOn,
    /// The handler ends the process.
    End,
}

/// Number of the signal that ends the process even if the command was to end by itself.
const FORCE_EXIT_SIGNAL: u32 = 3;

type Action = Box<dyn FnMut() -> AfterSignal + Send>;

#[derive(Default)]
struct State {
    installed: bool,
    signals: u32,
    action: Option<Action>,
    temporary_paths: Vec<PathBuf>,
}

impl State {
    /// Counts a signal and runs the action.
    fn signal(&mut self) -> AfterSignal {
        self.signals = self.signals.saturating_add(1);
        let then = self
            .action
            .as_mut()
            .map_or(AfterSignal::End, |action| action());
        if self.signals < FORCE_EXIT_SIGNAL {
            then
        } else {
            AfterSignal::End
        }
    }
}

static STATE: Mutex<State> = Mutex::new(State {
    installed: false,
    signals: 0,
    action: None,
    temporary_paths: Vec::new(),
});

/// Locks the state. A panic of another holder leaves it consistent.
fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets `action` as the action for signals, in place of the previous one.
///
/// # Errors
/// The handler cannot be installed.
pub(crate) fn on_interrupt(action: impl FnMut() -> AfterSignal + Send + 'static) -> io::Result<()> {
    let mut state = state();
    install(&mut state)?;
    state.action = Some(Box::new(action));
    Ok(())
}

/// Creates a file or a directory with `make`. A signal removes it until [`RemoveOnSignal`] is
/// dropped. A signal during `make` waits for its end.
///
/// # Errors
/// The errors of `make`, or the handler cannot be installed.
pub(crate) fn make<T>(
    make: impl FnOnce() -> io::Result<T>,
    path: impl FnOnce(&T) -> &Path,
) -> io::Result<(T, RemoveOnSignal)> {
    let mut state = state();
    install(&mut state)?;
    let made = make()?;
    let path = path(&made).to_owned();
    state.temporary_paths.push(path.clone());
    Ok((made, RemoveOnSignal(path)))
}

fn install(state: &mut State) -> io::Result<()> {
    if !state.installed {
        ctrlc::set_handler(handle).map_err(io::Error::other)?;
        state.installed = true;
    }
    Ok(())
}

fn handle() {
    let mut state = state();
    if state.signal() == AfterSignal::GoOn {
        return;
    }
    for path in &state.temporary_paths {
        remove(path);
    }
    // The lock is held, so no other thread creates a file any more.
    process::exit(INTERRUPTED.into());
}

/// Removes a path. Errors cannot be reported here. A link is removed, never followed.
fn remove(path: &Path) {
    let is_directory = fs::symlink_metadata(path).is_ok_and(|about| about.is_dir());
    let _ = match is_directory {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    };
}

/// A path that a signal removes.
#[derive(Debug)]
#[must_use]
pub(crate) struct RemoveOnSignal(PathBuf);

impl Drop for RemoveOnSignal {
    fn drop(&mut self) {
        let mut state = state();
        if let Some(index) = state
            .temporary_paths
            .iter()
            .position(|path| *path == self.0)
        {
            state.temporary_paths.swap_remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_does_not_end_is_ended() {
        let mut state = State::default();
        assert_eq!(state.signal(), AfterSignal::End);
        state = State {
            action: Some(Box::new(|| AfterSignal::GoOn)),
            ..State::default()
        };
        let then: Vec<AfterSignal> = (0..FORCE_EXIT_SIGNAL).map(|_| state.signal()).collect();
        assert_eq!(
            then,
            [AfterSignal::GoOn, AfterSignal::GoOn, AfterSignal::End]
        );
    }
}
