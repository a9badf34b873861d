//! How the command fails: one line on standard error, and an exit code that scripts can tell apart.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};

use ringfence_lab::{LabError, ProfileError};
#[cfg(feature = "live")]
use ringfence_live::guest::GuestError;
use ringfence_report::{ConditionError, DiffError, FailedCondition, IncomparableRow};
use ringfence_trace::{RecordError, TraceError, printable_line};

use crate::output::print_line;
use crate::profile_file::ProfileFileError;

/// Exit codes, as `--help` lists them.
const ERROR: u8 = 1;
const USAGE: u8 = 2;
const CONDITION: u8 = 3;

/// Why the command ends without success.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The experiment.
    Lab(LabError),
    /// A trace.
    Trace(TraceError),
    /// A file.
    Io {
        /// Which.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// A cost profile.
    Profile(ProfileFileError),
    /// What the command line makes of a profile.
    Platform(ProfileError),
    /// A condition about nothing.
    Condition(ConditionError),
    /// A file for `diff`.
    Diff {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        source: DiffError,
    },
    /// `--fail-if`: rows for which a condition holds.
    Held(Vec<FailedCondition>),
    /// `diff --fail-over`: rows that got worse.
    Worse(Vec<String>),
    /// `diff --fail-over`: reports that do not say whether anything got worse.
    NotComparable(IncomparableRow),
    /// An output that is the input as well.
    SameFile(PathBuf),
    /// An output whose name promises another form than the command writes.
    Form {
        /// Which.
        path: PathBuf,
        /// What would be right.
        advice: &'static str,
    },
    /// A recording.
    Record(RecordError),
    /// The command that a recording was to watch failed; the recording is whole.
    Workload(ExitStatus),
    /// A guest.
    #[cfg(feature = "live")]
    Guest(GuestError),
    /// Ctrl-C, while guests were being counted.
    Interrupted,
    /// Guests of an experiment that failed, so many of them; its findings say why.
    Guests(usize),
    /// Devices that do not go together, and why.
    #[cfg(feature = "live")]
    Devices(&'static str),
    /// `serve` and `guest` are not in this build.
    #[cfg(not(feature = "live"))]
    NotBuilt,
    /// Standard input was named where a trace is read twice.
    ReadTwice,
    /// Standard input was named as two traces.
    StdinTwice,
    /// Standard input is longer than what is kept of it.
    Spool {
        /// Bytes that are kept.
        limit: u64,
    },
    /// Traces for experiments of which none reads any.
    TraceUnread,
    /// The reader of our output has gone.
    Closed,
}

impl Failure {
    /// For `map_err` on what concerns the file at `path`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    /// The code the process ends with.
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
            #[cfg(feature = "live")]
            Self::Devices(_) => USAGE,
            Self::Closed => 0,
            _ => ERROR,
        })
    }

    /// Says so on standard error.
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
            Self::NotComparable(e) => write!(f, "--fail-over: {e}"),
            Self::SameFile(path) => write!(
                f,
                "{}: the output is the trace that is read; name another file",
                path.display()
            ),
            Self::Form { path, advice } => write!(f, "{}: {advice}", path.display()),
            Self::Record(e) => e.fmt(f),
            Self::Workload(status) => {
                write!(f, "the command ended with {status}; its trace was written")
            }
            Self::Interrupted => {
                f.write_str("interrupted; what had been counted stands above")
            }
            Self::Guests(1) => f.write_str("a guest failed; what is known of it stands above"),
            Self::Guests(n) => write!(f, "{n} guests failed; what is known of them stands above"),
            #[cfg(feature = "live")]
            Self::Guest(e) => e.fmt(f),
            #[cfg(feature = "live")]
            Self::Devices(why) => f.write_str(why),
            #[cfg(not(feature = "live"))]
            Self::NotBuilt => f.write_str(
                "this build serves no guests; build with `--features live`, or install with `--all-features`",
            ),
            Self::ReadTwice => {
                f.write_str("anonymising reads the trace twice: it has to be a file")
            }
            Self::StdinTwice => f.write_str("standard input is one trace: name - once"),
            Self::Spool { limit } => write!(
                f,
                "standard input is longer than the {limit} bytes that are kept to read it twice; \
                 name a file, or raise the limit by `--max-spool`"
            ),
            Self::TraceUnread => {
                f.write_str("--trace: only X07 and X22 read recorded traces; name one, or --all")
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
            #[cfg(feature = "live")]
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

#[cfg(feature = "live")]
impl From<GuestError> for Failure {
    fn from(e: GuestError) -> Self {
        Self::Guest(e)
    }
}
