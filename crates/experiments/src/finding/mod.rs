//! Findings: the numbers that an experiment measured, next to those that the paper prints, and the
//! verdict, which depends on the rows alone.

mod row;
mod verdict;

use serde::Serialize;

use super::figure::Figure;

pub use row::{FindingRow, Measured, NullModel, Published, Requirement, TOLERANCE};
pub use verdict::{NullScore, OrderScore, Score, Verdict};

/// Result of one experiment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// Id: `X01`, `X02`, ...
    pub id: &'static str,
    /// Subject of the experiment, as a heading.
    pub title: &'static str,
    /// Paper and section.
    pub source: &'static str,
    /// Description of the run, in a sentence or two.
    pub method: String,
    /// Verdict, derived from `rows`.
    pub verdict: Verdict,
    /// Number of rows and orders that hold, derived from `rows`.
    pub score: Score,
    /// Causes of a differing verdict and of numbers outside the tolerance.
    pub explanation: Vec<String>,
    /// Errata of the papers that matter here, assumptions, and limits of the numbers.
    pub notes: Vec<String>,
    /// Measured and printed numbers.
    pub rows: Vec<FindingRow>,
    /// Plots that correspond to the paper's figures.
    pub figures: Vec<Figure>,
    /// Wall-clock time of the experiment in seconds.
    pub seconds: f64,
}

/// Output of an experiment. [`Experiment::run`](super::Experiment::run) turns it into a
/// [`Finding`].
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// Description of the run.
    pub method: String,
    /// Measured and printed numbers.
    pub rows: Vec<FindingRow>,
    /// Causes of numbers outside the tolerance.
    pub explanation: Vec<String>,
    /// Errata, assumptions and limits of the numbers.
    pub notes: Vec<String>,
    /// Plots that correspond to the paper's figures.
    pub figures: Vec<Figure>,
}

impl Findings {
    /// Empty findings of an experiment that `method` describes.
    pub fn with_method(method: impl Into<String>) -> Self {
        Self {
            method: method.into(),
            ..Self::default()
        }
    }

    /// Appends a row.
    pub fn push(&mut self, row: FindingRow) {
        self.rows.push(row);
    }

    /// Appends an explanation.
    pub fn explain(&mut self, text: impl Into<String>) {
        self.explanation.push(text.into());
    }

    /// Appends a note.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }
}

/// Returns the median of `values`, and their spread as a share of it. The median of no values is
/// NaN.
pub(super) fn median(values: &[f64]) -> (f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else {
        return (f64::NAN, 0.0);
    };
    let upper = sorted.len() / 2;
    let lower = (sorted.len() - 1) / 2;
    let middle = (sorted[lower] + sorted[upper]) / 2.0;
    let spread = if middle == 0.0 {
        0.0
    } else {
        (last - first) / middle.abs()
    };
    (middle, spread)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_even_and_odd_numbers() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), (2.0, 1.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), (2.5, 1.2));
        assert!(median(&[]).0.is_nan());
    }
}
