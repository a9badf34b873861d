//! The table at the end of a run.

use std::time::Duration;

/// Outcome of a step.
#[derive(Debug)]
pub(crate) struct StepOutcome {
    pub(crate) name: &'static str,
    /// True if it ran in the background.
    pub(crate) beside: bool,
    /// Its note, or the reason for its failure.
    pub(crate) result: Result<String, String>,
    pub(crate) time: Duration,
    /// CPU time of the step and its child processes.
    pub(crate) used: Duration,
}

/// Returns one line per step, in the order in which they ended, and the sums; `time` is the total
/// time. The failures are at the end, in full, because some viewers show only the end of the
/// output.
pub(crate) fn table(outcomes: &[StepOutcome], time: Duration) -> String {
    let names = outcomes.iter().map(|outcome| outcome.name.chars().count());
    let width = names.max().unwrap_or(0);
    let mut lines = vec!["           time  processors".to_owned()];
    for outcome in outcomes {
        let (verdict, note) = match &outcome.result {
            Ok(note) => ("pass", note.as_str()),
            Err(error) => ("FAIL", error.lines().next().unwrap_or("")),
        };
        let line = format!(
            "{verdict}  {:>7.1} s{} {:>7.1} s  {:width$}  {note}",
            outcome.time.as_secs_f64(),
            if outcome.beside { '*' } else { ' ' },
            outcome.used.as_secs_f64(),
            outcome.name,
        );
        lines.push(line.trim_end().to_owned());
    }
    if outcomes.iter().any(|outcome| outcome.beside) {
        lines.push("* in the background".to_owned());
    }
    let used: Duration = outcomes.iter().map(|outcome| outcome.used).sum();
    let failed = outcomes.iter().filter(|o| o.result.is_err()).count();
    lines.push(format!(
        "{} steps in {:.0} s, {:.0} s of processors: {} passed, {failed} failed",
        outcomes.len(),
        time.as_secs_f64(),
        used.as_secs_f64(),
        outcomes.len() - failed,
    ));
    for outcome in outcomes {
        if let Err(error) = &outcome.result {
            lines.push(format!("FAILED: {}: {error}", outcome.name));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_notes_stand_below_each_other() {
        let outcome = |name, beside, result, used| StepOutcome {
            name,
            beside,
            result,
            time: Duration::from_millis(12_340),
            used: Duration::from_secs(used),
        };
        let outcomes = [
            outcome("build", true, Ok(String::new()), 20),
            outcome("tests", false, Ok("7 passed".into()), 4),
            outcome("fuzzing", false, Err("broken\nmore".into()), 0),
        ];
        let expected = "           time  processors
pass     12.3 s*    20.0 s  build
pass     12.3 s      4.0 s  tests    7 passed
FAIL     12.3 s      0.0 s  fuzzing  broken
* in the background
3 steps in 25 s, 24 s of processors: 2 passed, 1 failed
FAILED: fuzzing: broken
more";
        assert_eq!(table(&outcomes, Duration::from_secs(25)), expected);
    }
}
