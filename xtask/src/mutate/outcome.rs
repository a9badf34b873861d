//! Outcome of a mutant, from the output of its tests.

use std::process::Output;

use serde_json::{Value, json};

/// Exit code of `timeout` after it ended the command.
pub(super) const TIMED_OUT: i32 = 124;

/// Outcome of a mutant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MutantOutcome {
    /// These tests failed; the list is empty if a signal ended the process.
    Killed(Vec<String>),
    /// It exceeded the time limit.
    TimedOut,
    Survived,
    DoesNotApply,
    DoesNotBuild,
    /// The command failed but no test did: a full disk, or a test name that does not exist.
    NoTestFailed,
    /// The tests fail on the unmodified copy, or no test runs, so they detect nothing.
    FailsUnmutated,
}

impl MutantOutcome {
    /// Determines the outcome from the output of `timeout cargo test`.
    pub(super) fn of(output: &Output) -> Self {
        match output.status.code() {
            Some(0) => return Self::Survived,
            Some(TIMED_OUT) => return Self::TimedOut,
            _ => {}
        }
        let failed = failures(&String::from_utf8_lossy(&output.stdout));
        // A test that aborts also ends its runner, which then prints no names.
        let by_signal = String::from_utf8_lossy(&output.stderr).contains("(signal: ");
        if failed.is_empty() && !by_signal {
            Self::NoTestFailed
        } else {
            Self::Killed(failed)
        }
    }

    pub(super) fn is_kill(&self) -> bool {
        matches!(self, Self::Killed(_) | Self::TimedOut)
    }

    pub(super) fn shown(&self) -> &'static str {
        match self {
            Self::Killed(_) => "killed",
            Self::TimedOut => "killed (time)",
            Self::Survived => "SURVIVED",
            Self::DoesNotApply => "DOES NOT APPLY",
            Self::DoesNotBuild => "DOES NOT BUILD",
            Self::NoTestFailed => "NO TEST FAILED",
            Self::FailsUnmutated => "FAILS UNMUTATED",
        }
    }

    /// Converts to JSON; [`parse`](Self::parse) is the inverse.
    pub(super) fn to_json(&self) -> Value {
        match self {
            Self::Killed(tests) => json!({ "verdict": self.shown(), "failed": tests }),
            _ => json!({ "verdict": self.shown() }),
        }
    }

    /// Parses a kill; `None` for any other outcome, which the next run tries again.
    pub(super) fn parse(value: &Value) -> Option<Self> {
        match value["verdict"].as_str()? {
            "killed" => Some(Self::Killed(
                value["failed"]
                    .as_array()?
                    .iter()
                    .filter_map(|name| name.as_str().map(str::to_owned))
                    .collect(),
            )),
            "killed (time)" => Some(Self::TimedOut),
            _ => None,
        }
    }
}

/// Returns the names in the lists under `failures:`, which the runner prints last and indents.
fn failures(stdout: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut listed = false;
    for line in stdout.lines() {
        if line == "failures:" {
            listed = true;
        } else if let Some(name) = line.strip_prefix("    ").filter(|_| listed) {
            names.push(name.to_owned());
        } else if !line.is_empty() {
            // Output of the tests is under another `failures:`, each under a separate line.
            listed = false;
        }
    }
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    const FAILED: &str = "running 2 tests\n.F\nfailures:\n\n---- a::b stdout ----\n\nthread \
        panicked\n    at x\n\n\
        failures:\n    a::b\n\ntest result: FAILED. 1 passed; 1 failed\n";

    fn fate(code: i32, stdout: &str, stderr: &str) -> MutantOutcome {
        MutantOutcome::of(&Output {
            status: ExitStatus::from_raw(code << 8),
            stdout: stdout.into(),
            stderr: stderr.into(),
        })
    }

    #[test]
    fn only_a_failing_test_or_its_end_counts_as_a_kill() {
        for (got, wanted) in [
            (
                fate(101, FAILED, ""),
                MutantOutcome::Killed(vec!["a::b".into()]),
            ),
            (
                fate(101, "running 1 test\n", "exit (signal: 6, SIGABRT)"),
                MutantOutcome::Killed(vec![]),
            ),
            (fate(TIMED_OUT, "", ""), MutantOutcome::TimedOut),
        ] {
            assert_eq!(got, wanted);
            assert!(got.is_kill());
            assert_eq!(MutantOutcome::parse(&got.to_json()), Some(wanted));
        }
        for fate in [
            fate(0, "test result: ok. 3 passed", ""),
            fate(101, "", "error: no space left on device"),
            MutantOutcome::DoesNotApply,
            MutantOutcome::DoesNotBuild,
            MutantOutcome::FailsUnmutated,
        ] {
            assert!(!fate.is_kill());
            assert_eq!(MutantOutcome::parse(&fate.to_json()), None);
        }
    }
}
