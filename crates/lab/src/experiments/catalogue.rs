//! Every experiment that is run by its id.

use std::time::Instant;

use super::finding::{Finding, Findings, Verdict};
use crate::Profile;
use crate::error::LabError;

/// How much is run.
#[derive(Debug, Clone)]
pub struct Setting {
    /// What is charged.
    pub profile: Profile,
    /// Runs of a workload, one after the other on the same interface: what decision 0011 calls history.
    pub runs: usize,
    /// Timed repetitions.
    pub repetitions: usize,
}

impl Setting {
    /// What `ringfence reproduce` runs: ten of the documents' hundred runs.
    pub fn full() -> Self {
        Self {
            profile: Profile::r210_2015(),
            runs: 10,
            repetitions: 3,
        }
    }

    /// Hardly anything: for tests of structure, whose numbers say nothing.
    pub fn smoke() -> Self {
        Self {
            profile: Profile::r210_2015(),
            runs: 1,
            repetitions: 1,
        }
    }
}

/// An experiment of a document.
#[derive(Debug, Clone, Copy)]
pub struct Experiment {
    /// X01 and so on.
    pub id: &'static str,
    /// What it is about.
    pub title: &'static str,
    /// Which document and where in it.
    pub source: &'static str,
    /// How it is run.
    pub(super) measure: fn(&Setting) -> Result<Findings, LabError>,
}

impl Experiment {
    /// All, in the order of their ids.
    pub const ALL: &'static [Self] = &[
        super::x10_cached_node::EXPERIMENT,
        super::x11_search_length::EXPERIMENT,
        super::x12_freelists_strict::EXPERIMENT,
        super::x13_freelists_deferred::EXPERIMENT,
        super::x16_live_set::EXPERIMENT,
    ];

    /// The experiment of that id, in whatever case.
    pub fn find(id: &str) -> Option<&'static Self> {
        let same = |experiment: &&Self| experiment.id.eq_ignore_ascii_case(id);
        Self::ALL.iter().find(same)
    }

    /// Runs it.
    ///
    /// # Errors
    /// It could not be run to its end.
    pub fn run(&self, setting: &Setting) -> Result<Finding, LabError> {
        let begin = Instant::now();
        let found = (self.measure)(setting)?;
        Ok(Finding {
            id: self.id,
            title: self.title,
            source: self.source,
            method: found.method,
            verdict: Verdict::of(&found.rows),
            explanation: found.explanation,
            notes: found.notes,
            rows: found.rows,
            figures: found.figures,
            seconds: begin.elapsed().as_secs_f64(),
        })
    }
}
