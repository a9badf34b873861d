//! Errors of the command: one line on standard error, and an exit code for scripts.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};

use ringfence_guest_harness::GuestError;
use ringfence_lab::{LabError, ProfileError};
use ringfence_report::{
    ComparisonError, ConditionError, DiffError, FailedCondition, IncomparableRow, ProfileFileError,
};
use ringfence_sweep::{EncodeError, PlanError};
use ringfence_trace::{RecordError, TraceError};

use crate::function_profiler::ProfilerError;
use crate::output::{print_error_line, print_status};

/// Exit codes, as `--help` lists them.
const ERROR: u8 = 1;
const USAGE: u8 = 2;
const CONDITION: u8 = 3;

/// An error that ends the command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// An error of the experiment.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// An error of a trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// An error of a file.
    #[error("{}", path.display())]
    Io {
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// An error of the operating system that concerns no file.
    #[error("cannot {action}")]
    System {
        /// The action that failed.
        action: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A recording without a time and without a command.
    #[error("nothing to record; give --seconds N, or a command after --")]
    NoWorkload,
    /// An error of a cost profile file.
    #[error(transparent)]
    Profile(#[from] ProfileFileError),
    /// The profile is invalid with the changes of the command line.
    #[error(transparent)]
    Platform(ProfileError),
    /// An error of `calibrate --host`.
    #[error(transparent)]
    Profiler(#[from] ProfilerError),
    /// An option that applies to no selected mode.
    #[error("--{option} is not applicable to {mode}: {reason}; select other modes with --modes")]
    NotApplicable {
        /// Name of the option, without dashes.
        option: &'static str,
        /// The first selected mode.
        mode: String,
        /// The reason for this mode.
        reason: &'static str,
    },
    /// The profile's costs are those of another family of IOMMUs.
    #[error(transparent)]
    OtherFamily(ComparisonError),
    /// A condition that applies to nothing.
    #[error("--fail-if: {0}")]
    Condition(#[from] ConditionError),
    /// An error of a file for `diff`.
    #[error("{}: {source}", path.display())]
    Diff {
        /// Path of the invalid report.
        path: PathBuf,
        /// The error in the file.
        source: DiffError,
    },
    /// `--fail-if`: rows for which a condition holds.
    #[error("a condition holds")]
    Held(Vec<FailedCondition>),
    /// `diff --max-regression`: rows that got worse.
    #[error("rows got worse")]
    Worse(Vec<String>),
    /// `attack`: cells whose outcome breaks a promise, or with `--fail-on-success` all successes.
    #[error("attacks succeed")]
    AttacksSucceed(Vec<String>),
    /// `trace verify --from-boot`: an address differs, or the trace allows no conclusion.
    #[error("trace verify --from-boot: not all addresses agree")]
    Disagreement,
    /// `trace judge`: a device could reach reallocated pages. The report is on standard output.
    #[error("trace judge: a device could reach reallocated pages")]
    PagesReached,
    /// `diff --max-regression`: the reports do not allow a comparison.
    #[error("--max-regression: {0}")]
    NotComparable(IncomparableRow),
    /// The output file is also the input file.
    #[error("{}: the output is also the input trace; name another file", .0.display())]
    SameFile(PathBuf),
    /// The extension of the output file does not match the format that the command writes.
    #[error("{}: {advice}", path.display())]
    Form {
        /// Path of the output file.
        path: PathBuf,
        /// Advice to the user, printed after the path.
        advice: &'static str,
    },
    /// An error of a recording.
    #[error(transparent)]
    Record(RecordError),
    /// The command that ran during a recording failed; the recording is complete.
    #[error("the command ended with {0}; the trace is complete")]
    Workload(ExitStatus),
    /// An error of a guest.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// Ctrl-C interrupted the counting of guests.
    #[error("interrupted; the counts so far are printed above")]
    Interrupted,
    /// Number of an experiment's guests that failed; its findings give the reasons.
    #[error("{}", failed_guests(*.0))]
    Guests(usize),
    /// Device options that exclude each other, and the reason.
    #[error("{0}")]
    Devices(&'static str),
    /// The command reads the trace twice, but the trace is standard input, a FIFO or a device.
    #[error("trace anonymise reads its trace twice; name a regular file, not {}", .0.display())]
    ReadTwice(PathBuf),
    /// The command line names standard input or a FIFO as two traces.
    #[error("{} can be read only once; name it once", .0.display())]
    SameOnce(PathBuf),
    /// Standard input or a FIFO exceeds the limit on its stored bytes.
    #[error(
        "{name} exceeds the {limit} bytes that are stored to read it twice; name a file, or raise \
        the limit with `--max-spool`"
    )]
    Spool {
        /// Name of the input.
        name: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// The command line names traces, but no selected experiment reads traces.
    #[error("--trace requires X07, X22 or --all: no other experiment reads traces")]
    TraceUnread,
    /// An error of a plan or of a list of tasks.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The plan has no task of the name of `--task`.
    #[error("{} has no task {name}; `ringfence sweep PLAN --list` lists its tasks", plan.display())]
    NoSuchTask {
        /// Name on the command line.
        name: String,
        /// Path of the plan.
        plan: PathBuf,
    },
    /// The file of a task cannot be composed.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// `sweep`: number of failed tasks, whose rows give the reasons.
    #[error(
        "{0} tasks failed; the column `error` of their files gives the reasons, and \
        `--retry-failed` runs them again"
    )]
    TasksFailed(usize),
    /// The reader of standard output has closed the pipe, and the command has nothing else to do.
    #[error("output closed")]
    Closed,
}

fn failed_guests(number: usize) -> String {
    match number {
        1 => "a guest failed; the reason is printed above".into(),
        _ => format!("{number} guests failed; the reasons are printed above"),
    }
}

impl From<ComparisonError> for Failure {
    fn from(error: ComparisonError) -> Self {
        match error {
            ComparisonError::Profile(error) => Self::Platform(error),
            ComparisonError::NotApplicable {
                option,
                mode,
                reason,
            } => Self::NotApplicable {
                option,
                mode,
                reason,
            },
            other @ ComparisonError::OtherFamily { .. } => Self::OtherFamily(other),
        }
    }
}

impl Failure {
    /// Returns a function for `map_err` that adds `path` to an I/O error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    /// Returns a function for `map_err` that adds `path` to an error of writing. A closed pipe is
    /// [`Closed`](Self::Closed).
    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Io { path, source },
        }
    }

    /// Returns a function for `map_err` that adds the `action` that failed.
    pub(crate) fn system<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::System {
            action,
            source: error.into(),
        }
    }

    /// Returns the exit code of the process.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Held(_)
            | Self::Worse(_)
            | Self::AttacksSucceed(_)
            | Self::Disagreement
            | Self::PagesReached => CONDITION,
            Self::Condition(_)
            | Self::NotComparable(_)
            | Self::SameFile(_)
            | Self::Form { .. }
            | Self::Platform(_)
            | Self::SameOnce(_)
            | Self::NotApplicable { .. }
            | Self::OtherFamily(_)
            | Self::NoWorkload
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
                print_status(&format!("--fail-if holds for {} of the rows:", rows.len()));
                for row in rows {
                    print_error_line(&format!("  {row}"));
                }
            }
            Self::Worse(rows) => {
                print_status(&format!("{} rows got worse:", rows.len()));
                for row in rows {
                    print_error_line(&format!("  {row}"));
                }
            }
            Self::AttacksSucceed(cells) => {
                print_status(&format!("{} attacks succeed:", cells.len()));
                for cell in cells {
                    print_error_line(&format!("  {cell}"));
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
                print_status(&line);
            }
        }
    }
}
