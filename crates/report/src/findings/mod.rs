//! The findings of `ringfence reproduce`: as JSON, at a terminal, as an HTML page, as Markdown.

mod cells;
mod markdown;
mod page;
mod terminal;

pub use markdown::page as finding_markdown;
pub use page::page as findings_page;
pub use terminal::{
    experiments as experiments_table, finding as finding_terminal, summary as findings_terminal,
};

use serde::Serialize;

use super::data::MeasuredOn;
use ringfence_experiments::{Experiment, Finding, TOLERANCE, Verdict};
use ringfence_lab::Profile;

/// Version of the JSON form. A version may gain fields, but never removes a field or changes its
/// meaning.
const SCHEMA: u32 = 2;

/// The findings of one call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Reproduction {
    /// Version of this form.
    pub schema: u32,
    /// Version of the program.
    pub version: &'static str,
    /// The CPU of the measured cycles.
    pub measured_on: MeasuredOn,
    /// The profile of the modelled cycles.
    pub profile: Profile,
    /// Tolerance of a number, relative to the published one.
    pub tolerance: f64,
    /// Findings in the order of the request.
    pub findings: Vec<Finding>,
    /// Experiments of the papers that this build does not run.
    pub not_built: Vec<&'static str>,
}

/// IDs of the experiments that a complete build runs.
const WANTED: [&str; 25] = [
    "X01", "X02", "X03", "X04", "X05", "X06", "X07", "X08", "X09", "X10", "X11", "X12", "X13",
    "X14", "X15", "X16", "X17", "X18", "X19", "X21", "X22", "X23", "X24", "X25", "X26",
];

impl Reproduction {
    /// Creates a reproduction without findings.
    pub fn new(measured_on: MeasuredOn, profile: Profile) -> Self {
        Self {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            measured_on,
            profile,
            tolerance: TOLERANCE,
            findings: Vec::new(),
            not_built: WANTED
                .into_iter()
                .filter(|id| Experiment::find(id).is_none())
                .collect(),
        }
    }

    /// Returns the number of findings with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        let same = self
            .findings
            .iter()
            .filter(|finding| finding.verdict == verdict);
        same.count()
    }
}
