//! Errors of the command: one line on standard error, and an exit code for scripts.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};

use ringfence_guest_harness::GuestError;
use ringfence_lab::agreement::InconclusiveReason;
use ringfence_lab::{LabError, ProfileError};
use ringfence_report::{
    ComparisonError, ConditionError, DiffError, FailedCondition, IncomparableRow, ProfileFileError,
};
use ringfence_sweep::{EncodeError, PlanError};
use ringfence_trace::{RecordError, TraceError};

use crate::function_profiler::ProfilerError;
use crate::interrupt::INTERRUPTED;
use crate::output::{print_error_line, print_status};
use crate::spool_limit::SpoolLimit;

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
    #[error("--fail-if holds in {}", counted(.0.len(), "case", "cases"))]
    Held(Vec<FailedCondition>),
    /// `diff --max-regression`: rows that got worse.
    #[error("{}", counted(.0.len(), "row got worse", "rows got worse"))]
    Worse(Vec<String>),
    /// `attack`: unexpected outcomes in modes that promise at least own-pool safety. A refused
    /// grant and a class without attempts are among them, so an attack need not have succeeded.
    #[error(
        "{}",
        counted(
            .0.len(),
            "unexpected outcome in a mode that promises safety",
            "unexpected outcomes in modes that promise safety",
        )
    )]
    Unexpected(Vec<String>),
    /// `attack --fail-on-success`: the successes.
    #[error("{}", counted(.0.len(), "attack succeeds", "attacks succeed"))]
    AttacksSucceed(Vec<String>),
    /// `trace verify --from-boot`: an address differs.
    #[error("trace verify --from-boot: not all addresses agree")]
    Disagreement,
    /// `trace verify --from-boot`: the trace allows no conclusion.
    #[error("trace verify --from-boot: no conclusion: {0}")]
    Inconclusive(InconclusiveReason),
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
    #[error("{name} exceeds the {limit} that are stored to read it twice; {}", limit.advice())]
    Spool {
        /// Name of the input.
        name: String,
        /// The limit, which the text names with its unit.
        limit: SpoolLimit,
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
        "{}; the column `error` gives the reason, and `--retry-failed` runs failed tasks again",
        counted(*.0, "task failed", "tasks failed")
    )]
    TasksFailed(usize),
    /// The reader of standard output has closed the pipe, and the command has nothing else to do.
    #[error("output closed")]
    Closed,
}

/// Returns a number with the words for one thing or for several.
fn counted(number: usize, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
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
            | Self::Unexpected(_)
            | Self::AttacksSucceed(_)
            | Self::Disagreement
            | Self::Inconclusive(_)
            | Self::PagesReached => CONDITION,
            Self::Condition(_)
            | Self::NotComparable(_)
            | Self::SameFile(_)
            | Self::Form { .. }
            | Self::Platform(_)
            | Self::ReadTwice(_)
            | Self::SameOnce(_)
            | Self::NoSuchTask { .. }
            | Self::NotApplicable { .. }
            | Self::OtherFamily(_)
            | Self::NoWorkload
            | Self::TraceUnread => USAGE,
            Self::Devices(_) => USAGE,
            Self::Interrupted => INTERRUPTED,
            Self::Closed => 0,
            _ => ERROR,
        })
    }

    /// Reports the error on standard error.
    pub(crate) fn report(&self) {
        if matches!(self, Self::Closed) {
            return;
        }
        let rows = self.rows();
        let mut line = self.line();
        if !rows.is_empty() {
            line.push(':');
        }
        print_status(&line);
        for row in rows {
            print_error_line(&format!("  {row}"));
        }
    }

    /// Returns the error and its causes as one line.
    fn line(&self) -> String {
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
        line
    }

    /// Returns the rows that the error lists.
    fn rows(&self) -> Vec<String> {
        match self {
            Self::Held(rows) => rows.iter().map(ToString::to_string).collect(),
            Self::Worse(rows) | Self::Unexpected(rows) | Self::AttacksSucceed(rows) => rows.clone(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_state_what_happened() {
        let held = || FailedCondition {
            trace: "t".into(),
            mode: "defer".into(),
            condition: "maps>0".into(),
            value: 1.0,
        };
        let rows = |number| vec!["row".to_owned(); number];
        let spool = |bytes, option| Failure::Spool {
            name: "stdin".into(),
            limit: SpoolLimit { bytes, option },
        };
        for (failure, expected) in [
            (Failure::Held(vec![held()]), "--fail-if holds in 1 case"),
            // Two conditions may hold for one row.
            (
                Failure::Held(vec![held(), held()]),
                "--fail-if holds in 2 cases",
            ),
            (Failure::Worse(rows(1)), "1 row got worse"),
            (Failure::Worse(rows(2)), "2 rows got worse"),
            (Failure::AttacksSucceed(rows(1)), "1 attack succeeds"),
            (Failure::AttacksSucceed(rows(3)), "3 attacks succeed"),
            (
                Failure::Unexpected(rows(1)),
                "1 unexpected outcome in a mode that promises safety",
            ),
            (
                Failure::Unexpected(rows(2)),
                "2 unexpected outcomes in modes that promise safety",
            ),
            (
                Failure::Inconclusive(InconclusiveReason::LostEvents(2)),
                &format!(
                    "trace verify --from-boot: no conclusion: {}",
                    InconclusiveReason::LostEvents(2)
                ),
            ),
            (
                Failure::TasksFailed(1),
                "1 task failed; the column `error` gives the reason, and `--retry-failed` runs \
                failed tasks again",
            ),
            (
                spool(4 << 30, Some("--max-spool")),
                "stdin exceeds the 4 GiB that are stored to read it twice; name a file, or raise \
                the limit with `--max-spool`",
            ),
            (
                spool(1000, None),
                "stdin exceeds the 1000 bytes that are stored to read it twice; name a file",
            ),
        ] {
            assert_eq!(failure.line(), expected);
        }
        assert_eq!(
            Failure::Held(vec![held()]).rows(),
            ["t, defer: maps>0 (it is 1)"]
        );
        assert_eq!(Failure::Unexpected(rows(2)).rows(), rows(2));
    }

    #[test]
    fn equal_mistakes_have_equal_exit_codes() {
        let path = || PathBuf::from("-");
        for (failure, code) in [
            (Failure::SameOnce(path()), USAGE),
            (Failure::ReadTwice(path()), USAGE),
            (
                Failure::NoSuchTask {
                    name: "x".into(),
                    plan: path(),
                },
                USAGE,
            ),
            (Failure::TasksFailed(1), ERROR),
            (Failure::Unexpected(Vec::new()), CONDITION),
            (
                Failure::Inconclusive(InconclusiveReason::LostEvents(1)),
                CONDITION,
            ),
            (Failure::Interrupted, INTERRUPTED),
            (Failure::Closed, 0),
        ] {
            assert_eq!(failure.exit_code(), ExitCode::from(code), "{failure}");
        }
    }
}
