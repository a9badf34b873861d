//! Findings: the numbers that an experiment measured, next to those that the paper prints, and the
//! verdict, which depends on the rows alone.

mod row;
mod verdict;

use serde::Serialize;

use super::figure::Figure;

pub use row::{FindingRow, Measured, NullModel, Published, Requirement, TOLERANCE};
pub(super) use verdict::ordered_pairs;
pub use verdict::{NullScore, OrderScore, Score, Unjudged, Verdict};

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
    /// Numbers of rows and orders that hold, and of rows that are not judged, derived from `rows`.
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

    /// Appends a row. Its outcome follows from its numbers and its requirement, whatever the caller
    /// has set.
    pub fn push(&mut self, row: FindingRow) {
        self.rows.push(row.judge());
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

/// Median and spread of repetitions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Median {
    /// The median; NaN of no values.
    pub(super) middle: f64,
    /// Largest minus smallest value, in the unit of the values; NaN of no values.
    pub(super) spread: f64,
}

/// Returns the median of `values` and their spread.
pub(super) fn median(values: &[f64]) -> Median {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else {
        return Median {
            middle: f64::NAN,
            spread: f64::NAN,
        };
    };
    let upper = sorted.len() / 2;
    let lower = (sorted.len() - 1) / 2;
    Median {
        middle: (sorted[lower] + sorted[upper]) / 2.0,
        spread: last - first,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_even_and_odd_numbers() {
        let of = |values: &[f64]| {
            let found = median(values);
            (found.middle, found.spread)
        };
        assert_eq!(of(&[3.0, 1.0, 2.0]), (2.0, 2.0));
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), (2.5, 3.0));
        assert_eq!(of(&[-4.0, -8.0]), (-6.0, 4.0));
        let none = median(&[]);
        assert!(none.middle.is_nan() && none.spread.is_nan());
    }

    #[test]
    fn no_experiment_sets_the_outcome_of_its_rows() {
        let printed = || Published::new("9", 9.0, "test");
        let mut found = Findings::default();
        for (outcome, wanted) in [(Some(true), Some(false)), (None, Some(false))] {
            let row = FindingRow::counted("", "", 1.0).near(printed());
            found.push(FindingRow {
                holds: outcome,
                ..row
            });
            assert_eq!(found.rows.last().and_then(|row| row.holds), wanted);
        }
        let shown = FindingRow::counted("", "", 9.0).with_published(printed());
        found.push(FindingRow {
            holds: Some(true),
            ..shown
        });
        assert_eq!(found.rows.last().and_then(|row| row.holds), None);
    }

    /// Repetitions around 0 have a spread. Only equal ones are exact.
    #[test]
    fn a_median_of_zero_is_not_exact() {
        let found = median(&[-3.0, 0.0, 5.0]);
        assert_eq!((found.middle, found.spread), (0.0, 8.0));
        let exact = median(&[0.0, 0.0]);
        assert_eq!((exact.middle, exact.spread), (0.0, 0.0));
    }
}
