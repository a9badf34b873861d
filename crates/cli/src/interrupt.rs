//! Ctrl-C, SIGTERM and SIGHUP: what the command does then, and which files go with it.
//!
//! The process has one handler. It runs the command's own action, if there is one; otherwise it
//! removes the files and directories that are under way and ends the process. A command that goes
//! on may wait for somebody who does not come, a reader of its output for example: the third signal
//! ends it as well.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Exit code of a process that a signal has ended.
const INTERRUPTED: i32 = 130;

/// What comes after a command's action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterSignal {
    /// The command ends by itself, soon.
    GoOn,
    /// The process ends.
    End,
}

/// A command that was to end and has not by this signal is ended.
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
    /// A signal has come.
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

/// The state is whole at any time.
fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has a signal run `action`, instead of what it ran before.
///
/// # Errors
/// The handler cannot be installed.
pub(crate) fn on_interrupt(action: impl FnMut() -> AfterSignal + Send + 'static) -> io::Result<()> {
    let mut state = state();
    install(&mut state)?;
    state.action = Some(Box::new(action));
    Ok(())
}

/// Makes a file or a directory with `make`, which a signal removes until [`RemoveOnSignal`] is
/// dropped. A signal that comes meanwhile waits for the end of `make`.
///
/// # Errors
/// Those of `make`, or the handler cannot be installed.
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
    // The lock is held: nothing is made any more.
    process::exit(INTERRUPTED);
}

/// Nobody is left to tell of a failure. A link is removed, never followed.
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
        if let Some(place) = state
            .temporary_paths
            .iter()
            .position(|path| *path == self.0)
        {
            state.temporary_paths.swap_remove(place);
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
