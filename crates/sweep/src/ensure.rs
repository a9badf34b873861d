//! One task of a sweep: its file exists afterwards.

use std::io;
use std::path::Path;

use crate::machine::Machine;
use crate::run::run;
use crate::store::{Stored, stored};
use crate::table::{EncodeError, encode};
use crate::task::Task;

/// The work of [`ensure`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ensured {
    /// True if the task ran; false if its intact file existed.
    pub run: bool,
    /// True if a damaged file existed.
    pub damaged: bool,
    /// True if the row of the file says that the task failed.
    pub failed: bool,
    /// Error of the task, if it ran and failed.
    pub error: Option<String>,
}

/// The reason why a task has no file.
#[derive(Debug, thiserror::Error)]
pub enum EnsureError {
    /// The file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The row cannot be composed.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

/// Runs a task unless its intact file exists in `dir`. `store` writes the file: pass
/// [`store`](crate::store()), or a function that also removes the temporary file on a signal. A
/// failed task runs again if `retry_failed`.
///
/// # Errors
/// The file cannot be read or written, or the row cannot be encoded. A failed task is no error.
pub fn ensure(
    dir: &Path,
    task: &Task,
    machine: &Machine,
    retry_failed: bool,
    store: impl FnOnce(&Path, &str, &[u8]) -> io::Result<()>,
) -> Result<Ensured, EnsureError> {
    let before = stored(dir, &task.name)?;
    if let Stored::Intact { failed } = before
        && !(failed && retry_failed)
    {
        return Ok(Ensured {
            run: false,
            damaged: false,
            failed,
            error: None,
        });
    }
    let outcome = run(task);
    store(dir, &task.name, &encode(task, &outcome, machine)?)?;
    let error = outcome.result.err();
    Ok(Ensured {
        run: true,
        damaged: before == Stored::Damaged,
        failed: error.is_some(),
        error,
    })
}
