//! Sums the summaries that Rust's test runner prints.

use std::fmt;

use anyhow::ensure;

/// Number of tests by outcome.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summary {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Summary {
    /// Adds a line of the runner's output, if it is a summary: `test result: ok. 3 passed; 0
    /// failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
    pub(crate) fn add_line(&mut self, line: &str) {
        let Some(counts) = line.trim_start().strip_prefix("test result: ") else {
            return;
        };
        let counts = counts.split_once(". ").map_or(counts, |(_, rest)| rest);
        for part in counts.split("; ") {
            if let Some((Ok(count), kind)) = part
                .split_once(' ')
                .map(|(count, kind)| (count.parse::<u64>(), kind))
            {
                match kind {
                    "passed" => self.passed += count,
                    "failed" => self.failed += count,
                    "ignored" => self.ignored += count,
                    _ => {}
                }
            }
        }
    }

    /// Fails if no test ran: such a suite has not passed.
    pub(crate) fn ensure_some_ran(&self) -> anyhow::Result<()> {
        ensure!(self.passed + self.failed > 0, "no test ran");
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed", self.passed)?;
        if self.failed > 0 {
            write!(f, ", {} failed", self.failed)?;
        }
        if self.ignored > 0 {
            write!(f, ", {} ignored", self.ignored)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_add_up() {
        let mut summary = Summary::default();
        for line in [
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished \
            in 0.00s",
            "test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
            "a test result: ok. 100 passed",
        ] {
            summary.add_line(line);
        }
        assert_eq!(summary.to_string(), "7 passed, 2 failed, 1 ignored");
    }

    #[test]
    fn nothing_run_is_no_pass() {
        let mut summary = Summary::default();
        summary
            .add_line("test result: ok. 0 passed; 0 failed; 9 ignored; 0 measured; 0 filtered out");
        assert!(summary.ensure_some_ran().is_err());
    }
}
