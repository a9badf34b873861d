//! Errors of plans and of lists of tasks, with their file and line.

use std::io;
use std::path::{Path, PathBuf};

use ringfence_lab::compose::ComposeError;
use ringfence_lab::{LabError, ProfileError};
use ringfence_trace::TraceError;

/// An error of a plan or of a list of tasks.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The file, or a trace that it names, cannot be read.
    #[error("{}", path.display())]
    Io {
        /// Path of the file that cannot be read.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A line of the file is wrong.
    #[error("{}:{line}: {problem}", path.display())]
    At {
        /// Path of the plan or of the list.
        path: PathBuf,
        /// Line, from 1 on.
        line: usize,
        /// The error of this line.
        problem: Box<Problem>,
    },
}

impl PlanError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn at(path: &Path, line: usize, problem: Problem) -> Self {
        Self::At {
            path: path.to_owned(),
            line,
            problem: Box::new(problem),
        }
    }
}

/// The reason why a line of a plan or of a list is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The text is not TOML, or has a key that no plan has.
    #[error("{0}")]
    Toml(String),
    /// No mode has this name.
    #[error(transparent)]
    Mode(#[from] LabError),
    /// The composed mode is invalid.
    #[error(transparent)]
    Compose(#[from] ComposeError),
    /// No profile and no file has this name.
    #[error("no profile and no file is named {0}; `ringfence calibrate` writes a profile")]
    NoSuchProfile(String),
    /// The profile cannot be read.
    #[error("profile {name}: {source}")]
    ProfileIo {
        /// Name of the profile in the plan.
        name: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file is not a profile.
    #[error("profile {name}: line {line}: {message}")]
    ProfileToml {
        /// Name of the profile in the plan.
        name: String,
        /// Line of the profile, from 1 on.
        line: usize,
        /// Message of the TOML parser.
        message: String,
    },
    /// A number of the profile, or the geometry that the plan gives it, is invalid.
    #[error("profile {name}: {source}")]
    Profile {
        /// Name of the profile in the plan.
        name: String,
        /// The invalid number.
        source: ProfileError,
    },
    /// A parameter is outside its range.
    #[error("{parameter} = {value}: expected {expected}")]
    OutOfRange {
        /// Key of the parameter.
        parameter: &'static str,
        /// The value in the plan.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// A directory contains no trace.
    #[error("{}: the directory contains no file", .0.display())]
    EmptyDirectory(PathBuf),
    /// A trace is neither a file nor a directory. A sweep reads a trace more than once.
    #[error("{}: a sweep reads regular files only", .0.display())]
    NotAFile(PathBuf),
    /// A trace cannot be read.
    #[error("{}: {source}", path.display())]
    Trace {
        /// Path of the trace.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The devices of a trace cannot be listed for `split = "device"`.
    #[error("split = \"device\": {0}")]
    Devices(#[source] TraceError),
    /// The path is not UTF-8, so a list cannot contain it.
    #[error("{}: the path is not UTF-8", .0.display())]
    NotUtf8(PathBuf),
    /// Cycles of one device are not a part of the cycles of all devices.
    #[error(
        "split = \"device\" requires repetitions = 0: cycles of the devices of a trace do not add \
        up"
    )]
    TimedSplit,
    /// The plan has more tasks than a sweep runs.
    #[error("the plan has more than {limit} tasks; divide it")]
    TooManyTasks {
        /// The most tasks of one sweep.
        limit: usize,
    },
    /// The line is not a task.
    #[error("not a task of `ringfence sweep --list`: {0}")]
    NotATask(String),
    /// Another version of the program wrote the list.
    #[error(
        "the task is of ringfence {engine}, output {output}; this is {}, output {}: list the plan \
        again", env!("CARGO_PKG_VERSION"), crate::OUTPUT
    )]
    OtherVersion {
        /// Version of the program that wrote the list.
        engine: String,
        /// Its version of the output.
        output: u32,
    },
    /// The name of a task is not that of its content.
    #[error("the task is named {name}, but its content has the name {content}")]
    OtherName {
        /// Name in the list.
        name: String,
        /// Name of the content.
        content: String,
    },
}
