//! A run as a list of steps: each under its heading, all of them run whatever fails, a table at the end.

use std::time::{Duration, Instant};

use crate::repo::Repo;

/// What a step has to say in the closing table, such as how many tests passed.
pub(crate) type Note = String;

/// What a step does.
type Action = dyn FnOnce(&Repo) -> anyhow::Result<Note>;

/// One part of a run. Fails by returning an error; a part that could not run has failed.
pub(crate) struct Step {
    name: String,
    action: Box<Action>,
}

impl Step {
    pub(crate) fn new(
        name: impl Into<String>,
        action: impl FnOnce(&Repo) -> anyhow::Result<Note> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            action: Box::new(action),
        }
    }
}

struct Outcome {
    name: String,
    result: Result<Note, String>,
    time: Duration,
}

/// Runs every step and prints the table. `Ok(true)` if all passed.
pub(crate) fn run_all(repo: &Repo, steps: Vec<Step>) -> anyhow::Result<bool> {
    let count = steps.len();
    let mut outcomes = Vec::new();
    for (index, step) in steps.into_iter().enumerate() {
        println!("\n==== {}/{count} {} ====", index + 1, step.name);
        let start = Instant::now();
        let result = (step.action)(repo).map_err(|error| format!("{error:#}"));
        let time = start.elapsed();
        if let Err(error) = &result {
            println!("FAILED: {error}");
        }
        // At once too: a run that is cut short has no table.
        println!("---- {}: {:.1} s", step.name, time.as_secs_f64());
        outcomes.push(Outcome {
            name: step.name,
            result,
            time,
        });
    }
    println!("\n{}", table(&outcomes));
    Ok(outcomes.iter().all(|outcome| outcome.result.is_ok()))
}

fn table(outcomes: &[Outcome]) -> String {
    let width = outcomes
        .iter()
        .map(|outcome| outcome.name.chars().count())
        .max()
        .unwrap_or(0);
    let mut lines = Vec::new();
    for outcome in outcomes {
        let (verdict, note) = match &outcome.result {
            Ok(note) => ("pass", note.as_str()),
            Err(error) => ("FAIL", error.lines().next().unwrap_or("")),
        };
        lines.push(
            format!(
                "{verdict}  {:>7.1} s  {:width$}  {note}",
                outcome.time.as_secs_f64(),
                outcome.name,
            )
            .trim_end()
            .to_owned(),
        );
    }
    let total: Duration = outcomes.iter().map(|outcome| outcome.time).sum();
    let failed = outcomes.iter().filter(|o| o.result.is_err()).count();
    lines.push(format!(
        "{} steps in {:.0} s: {} passed, {failed} failed",
        outcomes.len(),
        total.as_secs_f64(),
        outcomes.len() - failed,
    ));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repo() -> Repo {
        Repo::find().unwrap()
    }

    #[test]
    fn a_failure_neither_stops_the_run_nor_passes_it() {
        let (send, receive) = std::sync::mpsc::channel();
        let steps = vec![
            Step::new("first", |_| anyhow::bail!("broken")),
            Step::new("second", move |_| {
                send.send(()).unwrap();
                Ok(String::new())
            }),
        ];
        assert!(!run_all(&repo(), steps).unwrap());
        assert!(receive.try_recv().is_ok(), "the second step ran");
    }

    #[test]
    fn all_pass() {
        let steps = vec![Step::new("only", |_| Ok(String::new()))];
        assert!(run_all(&repo(), steps).unwrap());
    }
}
