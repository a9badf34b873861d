//! Errors of the command: one line on standard error, and an exit code for scripts.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};

use ringfence_guest_harness::GuestError;
use ringfence_lab::{LabError, ProfileError};
use ringfence_report::{ConditionError, DiffError, FailedCondition, IncomparableRow};
use ringfence_trace::{RecordError, TraceError, printable_line};

use crate::output::print_line;
use crate::profile_file::ProfileFileError;

/// Exit codes, as `--help` lists them.
const ERROR: u8 = 1;
const USAGE: u8 = 2;
const CONDITION: u8 = 3;

/// An error that ends the command.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error of the experiment.
    Lab(LabError),
    /// An error of a trace.
    Trace(TraceError),
    /// An error of a file.
    Io {
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// An error of a cost profile file.
    Profile(ProfileFileError),
    /// The profile is invalid with the changes of the command line.
    Platform(ProfileError),
    /// A condition that applies to nothing.
    Condition(ConditionError),
    /// An error of a file for `diff`.
    Diff {
        /// Path of the invalid report.
        path: PathBuf,
        /// The error in the file.
        source: DiffError,
    },
    /// `--fail-if`: rows for which a condition holds.
    Held(Vec<FailedCondition>),
    /// `diff --max-regression`: rows that got worse.
    Worse(Vec<String>),
    /// `diff --max-regression`: the reports do not allow a comparison.
    NotComparable(IncomparableRow),
    /// The output file is also the input file.
    SameFile(PathBuf),
    /// The extension of the output file does not match the format that the command writes.
    Form {
        /// Path of the output file.
        path: PathBuf,
        /// Advice to the user, printed after the path.
        advice: &'static str,
    },
    /// An error of a recording.
    Record(RecordError),
    /// The command that ran during a recording failed; the recording is complete.
    Workload(ExitStatus),
    /// An error of a guest.
    Guest(GuestError),
    /// Ctrl-C interrupted the counting of guests.
    Interrupted,
    /// Number of an experiment's guests that failed; its findings give the reasons.
    Guests(usize),
    /// Device options that exclude each other, and the reason.
    Devices(&'static str),
    /// The command reads the trace twice, but the trace is standard input.
    ReadTwice,
    /// The command line names standard input as two traces.
    StdinTwice,
    /// Standard input exceeds the limit on its stored bytes.
    Spool {
        /// The limit in bytes.
        limit: u64,
    },
    /// The command line names traces, but no selected experiment reads traces.
    TraceUnread,
    /// The reader of standard output has closed the pipe.
    Closed,
}

impl Failure {
    /// Returns a function for `map_err` that adds `path` to an I/O error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    /// Returns the exit code of the process.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Held(_) | Self::Worse(_) => CONDITION,
            Self::Condition(_)
            | Self::NotComparable(_)
            | Self::SameFile(_)
            | Self::Form { .. }
            | Self::Platform(_)
            | Self::StdinTwice
            | Self::TraceUnread => USAGE,
            Self::Devices(_) => USAGE,
            Self::Closed => 0,
            _ => ERROR,
        })
    }

    /// Reports the error on standard error.
    pub(crate) fn report(&self) {
        match self {
            Self::Closed => {}
            Self::Held(rows) => {
                eprintln!("ringfence: --fail-if holds for {} of the rows:", rows.len());
                for row in rows {
                    eprintln!("  {}", printable_line(&row.to_string()));
                }
            }
            Self::Worse(rows) => {
                eprintln!("ringfence: {} rows got worse:", rows.len());
                for row in rows {
                    eprintln!("  {}", printable_line(row));
                }
            }
            _ => {
                let mut line = self.to_string();
                let mut source = self.source();
                while let Some(error) = source {
                    let text = error.to_string();
                    if !line.ends_with(&text) {
                        line.push_str(": ");
                        line.push_str(&text);
                    }
                    source = error.source();
                }
                print_line(&line);
            }
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lab(e) => e.fmt(f),
            Self::Trace(e) => e.fmt(f),
            Self::Io { path, .. } => write!(f, "{}", path.display()),
            Self::Profile(e) => e.fmt(f),
            Self::Platform(e) => e.fmt(f),
            Self::Condition(e) => write!(f, "--fail-if: {e}"),
            Self::Diff { path, source } => write!(f, "{}: {source}", path.display()),
            Self::Held(_) => f.write_str("a condition holds"),
            Self::Worse(_) => f.write_str("rows got worse"),
            Self::NotComparable(e) => write!(f, "--max-regression: {e}"),
            Self::SameFile(path) => write!(
                f,
                "{}: the output is also the input trace; name another file",
                path.display()
            ),
            Self::Form { path, advice } => write!(f, "{}: {advice}", path.display()),
            Self::Record(e) => e.fmt(f),
            Self::Workload(status) => {
                write!(f, "the command ended with {status}; the trace is complete")
            }
            Self::Interrupted => f.write_str("interrupted; the counts so far are printed above"),
            Self::Guests(1) => f.write_str("a guest failed; the reason is printed above"),
            Self::Guests(n) => write!(f, "{n} guests failed; the reasons are printed above"),
            Self::Guest(e) => e.fmt(f),
            Self::Devices(why) => f.write_str(why),
            Self::ReadTwice => {
                f.write_str("trace anonymise reads the trace twice; name a file instead of -")
            }
            Self::StdinTwice => f.write_str("standard input is one trace; name - once"),
            Self::Spool { limit } => write!(
                f,
                "standard input exceeds the {limit} bytes that are stored to read it twice; name a \
                 file, or raise the limit with `--max-spool`"
            ),
            Self::TraceUnread => {
                f.write_str("--trace requires X07, X22 or --all: no other experiment reads traces")
            }
            Self::Closed => f.write_str("output closed"),
        }
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Lab(e) => e.source(),
            Self::Trace(e) => e.source(),
            Self::Record(e) => e.source(),
            Self::Guest(e) => e.source(),
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<LabError> for Failure {
    fn from(e: LabError) -> Self {
        Self::Lab(e)
    }
}

impl From<TraceError> for Failure {
    fn from(e: TraceError) -> Self {
        Self::Trace(e)
    }
}

impl From<ProfileFileError> for Failure {
    fn from(e: ProfileFileError) -> Self {
        Self::Profile(e)
    }
}

impl From<ConditionError> for Failure {
    fn from(e: ConditionError) -> Self {
        Self::Condition(e)
    }
}

impl From<GuestError> for Failure {
    fn from(e: GuestError) -> Self {
        Self::Guest(e)
    }
}
