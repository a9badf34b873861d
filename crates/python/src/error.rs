//! The exceptions of the module.

use std::io;

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyOSError, PyValueError};
use pyo3::prelude::*;
use ringfence_lab::LabError;
use ringfence_report::{ComparisonError, ProfileFileError};
use ringfence_trace::RecordError as Recording;

create_exception!(ringfence, Error, PyException, "An error of ringfence.");
create_exception!(
    ringfence,
    TraceError,
    Error,
    "An error in a trace: `path` names the trace; `line` counts from 1, or is None."
);
create_exception!(ringfence, RecordError, Error, "A recording failed.");

/// An error of a call, raised after the interpreter's lock is held again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// An error of a trace.
    #[error(transparent)]
    Trace(#[from] ringfence_trace::TraceError),
    /// An error of a replay.
    #[error(transparent)]
    Lab(LabError),
    /// Inconsistent options of a comparison.
    #[error(transparent)]
    Comparison(#[from] ComparisonError),
    /// An error of a cost profile.
    #[error(transparent)]
    Profile(#[from] ProfileFileError),
    /// An error of a recording.
    #[error(transparent)]
    Record(#[from] Recording),
    /// The command of a recording failed.
    #[error("the command ended with {0}; the trace is complete")]
    Workload(std::process::ExitStatus),
    /// An error of a file.
    #[error("{path}: {source}")]
    Io {
        /// Path of the file.
        path: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// An argument has an invalid value.
    #[error("{0}")]
    Value(String),
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Self {
        match error {
            LabError::Trace(error) => Self::Trace(error),
            other => Self::Lab(other),
        }
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Trace(error) => of_trace(&error),
            Failure::Io { path, source } => of_io(&path, &source),
            Failure::Profile(ProfileFileError::Io(path, source)) => {
                of_io(&path.display().to_string(), &source)
            }
            Failure::Record(_) | Failure::Workload(_) => RecordError::new_err(text(&failure)),
            Failure::Comparison(_) | Failure::Profile(_) | Failure::Value(_) => {
                PyValueError::new_err(text(&failure))
            }
            Failure::Lab(LabError::NoSuchMode(_) | LabError::NoSuchDevice { .. }) => {
                PyValueError::new_err(text(&failure))
            }
            Failure::Lab(_) => Error::new_err(text(&failure)),
        }
    }
}

/// Returns the exception for an error of a trace: that of the operating system if the trace cannot
/// be opened, otherwise `TraceError` with file and line.
fn of_trace(error: &ringfence_trace::TraceError) -> PyErr {
    if let ringfence_trace::TraceError::Io {
        file,
        line: 0,
        source,
    } = error
    {
        return of_io(file, source);
    }
    let (path, line) = (error.file().into_owned(), error.line());
    Python::attach(|py| {
        let exception = TraceError::new_err(text(error));
        let value = exception.value(py);
        let set = value
            .setattr("path", path)
            .and_then(|()| value.setattr("line", line));
        set.map_or_else(|error| error, |()| exception)
    })
}

/// Returns the subclass of `OSError` for an error of the file `path`.
fn of_io(path: &str, error: &io::Error) -> PyErr {
    match error.raw_os_error() {
        Some(number) => {
            let text = io::Error::from_raw_os_error(number).to_string();
            let end = text.find(" (os error").unwrap_or(text.len());
            PyOSError::new_err((number, text[..end].to_owned(), path.to_owned()))
        }
        None => PyOSError::new_err(format!("{path}: {error}")),
    }
}

/// Returns the message of an error and of its sources.
pub(crate) fn text(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let text = error.to_string();
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        source = error.source();
    }
    line
}
