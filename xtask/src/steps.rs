//! Runs a list of steps, each under its heading. A failure does not stop later steps. A table
//! follows at the end.
//!
//! Steps run one after another, except background steps. These run one after another in a separate
//! thread, in parallel to the others: steps that only prepare at the lowest priority, tests at the
//! normal one. Their output is printed between two other steps, under their own heading.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Instant;

use crate::output;
use crate::process::{self, Priority};
use crate::repo::Repo;
use crate::table::{StepOutcome, table};
use crate::usage;

/// Note of a step in the final table, such as the number of passed tests.
pub(crate) type Note = String;

/// Action of a step.
type Action = dyn FnOnce(&Repo) -> anyhow::Result<Note> + Send;

/// One part of a run. It fails by returning an error; a part that could not run has failed.
pub(crate) struct Step {
    name: &'static str,
    beside: Option<Priority>,
    waits: Waits,
    action: Box<Action>,
}

/// Background steps that a step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waits {
    None,
    /// The step of this name.
    One(&'static str),
    All,
}

impl Step {
    pub(crate) fn new(
        name: &'static str,
        action: impl FnOnce(&Repo) -> anyhow::Result<Note> + Send + 'static,
    ) -> Self {
        Self {
            name,
            beside: None,
            waits: Waits::None,
            action: Box::new(action),
        }
    }

    /// Runs this step in the background, in parallel with later steps and after earlier background
    /// steps. It starts after all steps before it in the list that are not background steps.
    pub(crate) fn beside(mut self, priority: Priority) -> Self {
        self.beside = Some(priority);
        self
    }

    /// Runs this step after the background step `name`.
    pub(crate) fn after(mut self, name: &'static str) -> Self {
        self.waits = Waits::One(name);
        self
    }

    /// Runs this step after all background steps before it.
    pub(crate) fn alone(mut self) -> Self {
        self.waits = Waits::All;
        self
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Runs the step under its heading.
    fn run(self, repo: &Repo, progress: &str) -> StepOutcome {
        output::line(&format!("\n==== {progress} {} ====", self.name));
        let start = Instant::now();
        let used = usage::so_far();
        let result = (self.action)(repo).map_err(|error| format!("{error:#}"));
        let time = start.elapsed();
        let used = usage::so_far().saturating_sub(used);
        if let Err(error) = &result {
            output::line(&format!("FAILED: {error}"));
        }
        // Print the times at once, because an interrupted run has no table.
        output::line(&format!(
            "---- {}: {:.1} s, {:.1} s of processors",
            self.name,
            time.as_secs_f64(),
            used.as_secs_f64()
        ));
        StepOutcome {
            name: self.name,
            beside: self.beside.is_some(),
            result,
            time,
            used,
        }
    }
}

/// Runs every step and prints the table. `Ok(true)` if all passed.
pub(crate) fn run_all(repo: &Repo, steps: Vec<Step>) -> anyhow::Result<bool> {
    let count = steps.len();
    let start = Instant::now();
    let mut outcomes = Vec::new();
    thread::scope(|scope| {
        let (send_step, steps_to_run) = channel::<(String, Step)>();
        let (send_outcome, results) = channel();
        scope.spawn(move || {
            output::keep();
            for (progress, step) in steps_to_run {
                process::set_priority(step.beside.unwrap_or_default());
                let outcome = step.run(repo, &progress);
                if send_outcome.send((output::take(), outcome)).is_err() {
                    break;
                }
            }
        });
        let mut beside = BackgroundSteps {
            results,
            running: VecDeque::new(),
        };
        for (index, step) in steps.into_iter().enumerate() {
            let progress = format!("{}/{count}", index + 1);
            if step.beside.is_some() {
                println!("\n==== {progress} {}: in the background ====", step.name);
                beside.running.push_back(step.name);
                // The send fails only if the background thread has panicked; the scope then panics
                // too.
                let _ = send_step.send((progress, step));
                continue;
            }
            outcomes.extend(match step.waits {
                Waits::None => Vec::new(),
                Waits::One(name) => beside.wait_for(name),
                Waits::All => beside.wait_for_all(),
            });
            outcomes.push(step.run(repo, &progress));
            outcomes.extend(beside.finished());
        }
        drop(send_step);
        outcomes.extend(beside.wait_for_all());
    });
    println!("\n{}", table(&outcomes, start.elapsed()));
    Ok(outcomes.iter().all(|outcome| outcome.result.is_ok()))
}

/// The background steps.
struct BackgroundSteps {
    results: Receiver<(String, StepOutcome)>,
    running: VecDeque<&'static str>,
}

impl BackgroundSteps {
    /// Returns the outcomes of background steps that have ended since the last call, and shows
    /// their output.
    fn finished(&mut self) -> Vec<StepOutcome> {
        let ended: Vec<_> = self.results.try_iter().collect();
        ended.into_iter().map(|one| self.show(one)).collect()
    }

    /// Like [`finished`](Self::finished), after waiting for the step `name`.
    fn wait_for(&mut self, name: &str) -> Vec<StepOutcome> {
        let mut ended = self.finished();
        if self.running.contains(&name) {
            println!("\nwaiting for: {name}");
        }
        while self.running.contains(&name) {
            match self.results.recv() {
                Ok(one) => ended.push(self.show(one)),
                // The background thread has panicked; the scope will panic too.
                Err(_) => self.running.clear(),
            }
        }
        ended
    }

    /// Like [`finished`](Self::finished), after waiting for all background steps.
    fn wait_for_all(&mut self) -> Vec<StepOutcome> {
        let mut ended = Vec::new();
        while let Some(last) = self.running.back().copied() {
            ended.extend(self.wait_for(last));
        }
        ended
    }

    fn show(&mut self, (text, outcome): (String, StepOutcome)) -> StepOutcome {
        print!("{text}");
        self.running.retain(|name| *name != outcome.name);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    fn repo() -> Repo {
        Repo::find().unwrap()
    }

    fn says(
        send: &Sender<u32>,
        what: u32,
    ) -> impl FnOnce(&Repo) -> anyhow::Result<Note> + Send + use<> {
        let send = send.clone();
        move |_| {
            send.send(what)?;
            Ok(String::new())
        }
    }

    #[test]
    fn a_failure_neither_stops_the_run_nor_passes_it() {
        let (send, receive) = channel();
        let steps = vec![
            Step::new("first", |_| anyhow::bail!("broken")),
            Step::new("second", says(&send, 2)),
        ];
        assert!(!run_all(&repo(), steps).unwrap());
        assert!(receive.try_recv().is_ok(), "the second step ran");
    }

    #[test]
    fn all_pass() {
        let steps = vec![Step::new("only", |_| Ok(String::new()))];
        assert!(run_all(&repo(), steps).unwrap());
    }

    #[test]
    fn background_steps_run_concurrently() {
        let (send, receive) = channel();
        let (go, gone) = channel();
        let steps = vec![
            Step::new("beside", {
                let send = send.clone();
                move |_| {
                    // Waits until the next step lets it continue.
                    gone.recv()?;
                    send.send(1)?;
                    Ok(String::new())
                }
            })
            .beside(Priority::Lowest),
            Step::new("beside too", says(&send, 2)).beside(Priority::Normal),
            Step::new("next", says(&go, 0)),
            Step::new("needs it", says(&send, 3)).after("beside too"),
        ];
        assert!(run_all(&repo(), steps).unwrap());
        drop(send);
        assert_eq!(receive.iter().collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn a_step_alone_waits_for_every_background_step_before_it() {
        let (send, receive) = channel();
        let (go, gone) = channel();
        let waits = move |_: &Repo| {
            gone.recv()?;
            Ok(String::new())
        };
        let steps = vec![
            Step::new("beside", waits).beside(Priority::Lowest),
            Step::new("beside too", says(&send, 1)).beside(Priority::Normal),
            Step::new("next", says(&go, 0)),
            Step::new("alone", says(&send, 2)).alone(),
        ];
        assert!(run_all(&repo(), steps).unwrap());
        drop(send);
        assert_eq!(receive.iter().collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn background_steps_run_at_their_priority() {
        let (send, receive) = channel();
        let nice = |name| {
            let send = send.clone();
            Step::new(name, move |repo| {
                send.send(process::capture(&mut process::command(&repo.root, "nice"))?)?;
                Ok(String::new())
            })
        };
        let steps = vec![
            nice("first"),
            nice("prepares").beside(Priority::Lowest),
            nice("tests").beside(Priority::Normal),
        ];
        assert!(run_all(&repo(), steps).unwrap());
        drop(send);
        let nice: Vec<_> = receive.iter().map(|text| text.trim().to_owned()).collect();
        assert_eq!(nice, [nice[0].as_str(), "19", nice[0].as_str()]);
    }

    #[test]
    #[should_panic(expected = "a scoped thread panicked")]
    fn background_panic_does_not_hang() {
        let steps = vec![
            Step::new("beside", |_| panic!("on purpose")).beside(Priority::Lowest),
            Step::new("beside too", |_| Ok(String::new())).beside(Priority::Lowest),
            Step::new("needs it", |_| Ok(String::new())).after("beside"),
        ];
        let _ = run_all(&repo(), steps);
    }

    #[test]
    fn background_failure_fails_the_run() {
        let steps = vec![
            Step::new("beside", |_| anyhow::bail!("broken")).beside(Priority::Normal),
            Step::new("next", |_| Ok(String::new())),
        ];
        assert!(!run_all(&repo(), steps).unwrap());
    }
}
