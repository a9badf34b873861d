//! An experiment: its id, its source, and the function that measures it.

use std::time::Instant;

use super::finding::{Finding, Findings, Score, Verdict};
use super::setting::Setting;
use ringfence_lab::LabError;

/// An experiment of one of the papers.
#[derive(Debug, Clone, Copy)]
pub struct Experiment {
    /// Id: `X01`, `X02`, ...
    pub id: &'static str,
    /// Subject of the experiment, as a heading.
    pub title: &'static str,
    /// Paper and section.
    pub source: &'static str,
    pub(super) measure: Measure,
}

/// Function that runs an experiment.
pub(super) type Measure = fn(&Setting) -> Result<Findings, LabError>;

impl Experiment {
    /// Runs the experiment and derives its verdict.
    ///
    /// # Errors
    /// A replay or a workload of the experiment failed.
    pub fn run(&self, setting: &Setting) -> Result<Finding, LabError> {
        let begin = Instant::now();
        let found = (self.measure)(setting)?;
        Ok(Finding {
            id: self.id,
            title: self.title,
            source: self.source,
            method: found.method,
            verdict: Verdict::of(&found.rows),
            score: Score::of(&found.rows),
            explanation: found.explanation,
            notes: found.notes,
            rows: found.rows,
            figures: found.figures,
            seconds: begin.elapsed().as_secs_f64(),
        })
    }
}
