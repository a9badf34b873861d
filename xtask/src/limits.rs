//! Memory of the command on hostile traces of every format (docs/LIMITS.md).

use anyhow::{anyhow, ensure};

use crate::process;
use crate::product;
use crate::repo::Repo;

/// Size of each hostile trace, in units of 10^6 bytes. Sizes of 1, 10 and 100 are run by hand.
const MEGABYTES: &str = "0.1";
/// Processor seconds of a run, in addition to those for the size of the trace.
const SECONDS: &str = "30";
/// Number of runs: 15 traces in three formats, each with four commands, without `trace info` of
/// Parquet.
const RUNS: usize = 15 * (3 * 4 - 1);

/// Runs `tests/limits/amplify.py` on the optimised command.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<String> {
    let command = product::build(repo)?;
    let mut rows = 0;
    process::show(
        process::command(&repo.root, "python3")
            .arg("tests/limits/amplify.py")
            .arg(&command)
            .args(["--megabytes", MEGABYTES, "--seconds", SECONDS]),
        |line| rows += usize::from(is_row(line)),
    )
    .map_err(|error| anyhow!("amplify.py failed: {error:#}"))?;
    ensure!(rows == RUNS, "{rows} of {RUNS} runs were measured");
    Ok(format!("{rows} runs within their bounds"))
}

/// Returns true for a row of the script's table that is neither its heading nor the rule below it.
fn is_row(line: &str) -> bool {
    line.starts_with("| ") && !line.starts_with("| format")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_of_runs_count() {
        assert!(is_row(
            "| text | alive | info | 100 | 9 | 0.0 | 0.01 | done |"
        ));
        for line in ["| format | trace |", "|---|---|", "", "Traceback"] {
            assert!(!is_row(line), "{line}");
        }
    }
}
