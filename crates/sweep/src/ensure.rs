//! One task of a sweep: its file exists afterwards.

use std::io;
use std::path::Path;

use crate::machine::Machine;
use crate::run::{Outcome, run};
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
/// failed task runs again if `retry_failed`. A failure never replaces the file of a task that did
/// not fail.
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
    ensure_by(run, dir, task, machine, retry_failed, store)
}

fn ensure_by(
    run: impl FnOnce(&Task) -> Outcome,
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
    if outcome.result.is_err()
        && let Stored::Intact { failed: false } = stored(dir, &task.name)?
    {
        // Another process ran the task in the meantime, and it did not fail.
        return Ok(Ensured {
            run: true,
            damaged: false,
            failed: false,
            error: None,
        });
    }
    store(dir, &task.name, &encode(task, &outcome, machine)?)?;
    let error = outcome.result.err();
    Ok(Ensured {
        run: true,
        damaged: before == Stored::Damaged,
        failed: error.is_some(),
        error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Plan;

    #[test]
    fn a_failure_does_not_replace_the_row_of_another_process() {
        let dir = tempfile::Builder::new().prefix("ringfence-").tempdir();
        let dir = dir.unwrap();
        let plan = Plan::parse(&dir.path().join("plan.toml"), "").unwrap();
        let task = plan.tasks().unwrap().swap_remove(0);
        let failed = || Outcome {
            result: Err("no memory".to_owned()),
            seconds: 1.0,
        };
        let keep = |dir: &Path, name: &str, bytes: &[u8]| crate::store(dir, name, bytes);
        let this = Machine::this();
        let ensured = |run: &dyn Fn(&Task) -> Outcome| {
            ensure_by(run, dir.path(), &task, &this, true, keep).unwrap()
        };

        let first = ensured(&|_| failed());
        assert!(first.run && first.failed);
        let second = ensured(&|task| {
            let bytes = encode(task, &run(task), &this).unwrap();
            keep(dir.path(), &task.name, &bytes).unwrap();
            failed()
        });
        assert!(second.run && !second.failed);
        let file = stored(dir.path(), &task.name).unwrap();
        assert_eq!(file, Stored::Intact { failed: false });
    }
}
