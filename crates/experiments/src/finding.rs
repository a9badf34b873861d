//! Findings: the numbers that an experiment measured, next to those that the paper prints, and the
//! verdict, which depends on the rows alone.

use serde::Serialize;

use super::figure::Figure;

/// Relative error up to which a measured number counts as reproduced.
pub const TOLERANCE: f64 = 0.15;

/// A number that a paper prints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Published {
    /// The cell as printed.
    pub text: String,
    /// The number that the cell stands for.
    pub value: f64,
    /// File, row and column of the bundled table.
    pub source: String,
}

impl Published {
    /// The number `value`, printed as `text` in `source`.
    pub fn new(text: impl Into<String>, value: f64, source: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            value,
            source: source.into(),
        }
    }
}

/// A number measured by an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measured {
    /// Median of the repetitions, or the count itself.
    pub median: f64,
    /// Largest minus smallest repetition, as a share of the median; 0 for counts.
    pub spread: f64,
    /// Measured part of the median, in the unit of the row. `None` if the number is not a cost.
    pub measured_part: Option<f64>,
    /// Part of the median that the profile models, in the unit of the row. `None` if the number is
    /// not a cost.
    pub modelled_part: Option<f64>,
}

impl Measured {
    /// A count, or a number derived from counts.
    pub const fn counted(value: f64) -> Self {
        Self {
            median: value,
            spread: 0.0,
            measured_part: None,
            modelled_part: None,
        }
    }

    /// A cost of a measured and a modelled part. `spread` is a share of their sum.
    pub fn cost(measured: f64, modelled: f64, spread: f64) -> Self {
        Self {
            median: measured + modelled,
            spread,
            measured_part: Some(measured),
            modelled_part: Some(modelled),
        }
    }

    /// A number derived from timing, not split into a measured and a modelled part.
    pub const fn timed(median: f64, spread: f64) -> Self {
        Self {
            median,
            spread,
            measured_part: None,
            modelled_part: None,
        }
    }
}

/// Comparison of a row with the paper's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Requirement {
    /// Equal to the paper's number.
    Exact,
    /// Within [`TOLERANCE`] of the paper's number.
    Near,
    /// At least the paper's number.
    AtLeast,
    /// At most the paper's number.
    AtMost,
    /// Not compared. The row is shown for information.
    Shown,
}

/// One number, measured and printed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FindingRow {
    /// The quantity that the row measures.
    pub quantity: String,
    /// Its unit; empty for ratios.
    pub unit: &'static str,
    /// The paper's number; `None` if the paper does not print it.
    pub published: Option<Published>,
    /// The measured number; `None` if this build or its input cannot measure it.
    pub measured: Option<Measured>,
    /// Measured over printed; `None` if either is missing, or if the printed cell has no digits.
    pub ratio: Option<f64>,
    /// Comparison that the row must pass.
    pub requirement: Requirement,
    /// True if the row passes `requirement`; `None` if it is not judged.
    pub holds: Option<bool>,
    /// Group whose rows must be in the paper's order; `None` if the order does not count.
    pub group: Option<&'static str>,
    /// True if this number was fitted to the paper's: it predicts nothing and is not judged.
    pub fitted: bool,
}

impl FindingRow {
    /// A row without a printed number and without a requirement.
    pub fn new(what: impl Into<String>, unit: &'static str, measured: Measured) -> Self {
        Self {
            quantity: what.into(),
            unit,
            published: None,
            measured: Some(measured),
            ratio: None,
            requirement: Requirement::Shown,
            holds: None,
            group: None,
            fitted: false,
        }
    }

    /// A row of a count, without a printed number and without a requirement.
    pub fn counted(what: impl Into<String>, unit: &'static str, value: f64) -> Self {
        Self::new(what, unit, Measured::counted(value))
    }

    /// Adds the paper's number, which the row must equal.
    #[must_use]
    pub fn exact(self, printed: Published) -> Self {
        self.beside(printed).require(Requirement::Exact)
    }

    /// Adds the paper's number, from which the row may differ by [`TOLERANCE`].
    #[must_use]
    pub fn near(self, printed: Published) -> Self {
        self.beside(printed).require(Requirement::Near)
    }

    /// Adds the paper's number, which the row must reach.
    #[must_use]
    pub fn at_least(self, printed: Published) -> Self {
        self.beside(printed).require(Requirement::AtLeast)
    }

    /// Adds the paper's number, which the row must not exceed.
    #[must_use]
    pub fn at_most(self, printed: Published) -> Self {
        self.beside(printed).require(Requirement::AtMost)
    }

    /// Adds the paper's number.
    #[must_use]
    pub fn beside(mut self, printed: Published) -> Self {
        self.published = Some(printed);
        self.judge()
    }

    /// Sets the requirement of the row.
    #[must_use]
    pub fn require(mut self, demand: Requirement) -> Self {
        self.requirement = demand;
        self.judge()
    }

    /// Puts the row into a group whose order counts.
    #[must_use]
    pub fn ordered_in(mut self, group: &'static str) -> Self {
        self.group = Some(group);
        self
    }

    /// Marks the number as fitted to the paper's, which exempts it from judgement.
    #[must_use]
    pub fn fitted(mut self) -> Self {
        self.fitted = true;
        self.judge()
    }

    fn judge(mut self) -> Self {
        let both = self.published.as_ref().zip(self.measured);
        self.ratio = both
            // Some cells are words that `read_as` maps to a number; a ratio to it means nothing.
            .filter(|(printed, _)| {
                printed.value != 0.0 && printed.text.contains(|c: char| c.is_ascii_digit())
            })
            .map(|(printed, measured)| measured.median / printed.value);
        self.holds = both.and_then(|(printed, measured)| {
            let (wanted, found) = (printed.value, measured.median);
            match self.requirement {
                _ if self.fitted => None,
                Requirement::Shown => None,
                Requirement::Exact => Some(found == wanted),
                Requirement::Near => Some((found - wanted).abs() <= TOLERANCE * wanted.abs()),
                Requirement::AtLeast => Some(found >= wanted),
                Requirement::AtMost => Some(found <= wanted),
            }
        });
        self
    }
}

/// Degree to which an experiment reproduced the paper's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Every row passes its requirement, and every group has the paper's order.
    Reproduced,
    /// Every group has the paper's order, but a number fails a requirement other than
    /// [`Requirement::Exact`].
    OrderingOnly,
    /// A group has another order, an exact number differs, or an experiment without groups has a
    /// number that fails its requirement.
    Differs,
    /// Not run: the build or the input lacks something that the experiment needs.
    NotRun,
}

impl Verdict {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reproduced => "reproduced",
            Self::OrderingOnly => "ordering only",
            Self::Differs => "differs",
            Self::NotRun => "not run",
        }
    }

    /// Derives the verdict from `rows` alone. Rows that are not judged and groups of fitted or
    /// unmeasured rows are ignored. Without any remaining row or group the verdict is
    /// [`Verdict::NotRun`].
    ///
    /// An experiment whose numbers fail and which has no ordered group gets [`Verdict::Differs`]:
    /// it has no order that could count as reproduced.
    pub fn of(rows: &[FindingRow]) -> Self {
        let judged = rows.iter().filter_map(|row| Some((row, row.holds?)));
        let orders = orders(rows);
        if judged.clone().next().is_none() && orders.is_empty() {
            return Self::NotRun;
        }
        let exact_fails = judged
            .clone()
            .any(|(row, holds)| row.requirement == Requirement::Exact && !holds);
        if exact_fails || orders.iter().any(|holds| !holds) {
            return Self::Differs;
        }
        let near = judged
            .clone()
            .filter(|(row, _)| row.requirement != Requirement::Exact);
        if near.clone().all(|(_, holds)| holds) {
            Self::Reproduced
        } else if orders.is_empty() {
            Self::Differs
        } else {
            Self::OrderingOnly
        }
    }
}

/// For each pair of rows of a group with different printed numbers: true if the measured numbers
/// differ in the same direction.
fn orders(rows: &[FindingRow]) -> Vec<bool> {
    let mut out = Vec::new();
    let usable = |row: &FindingRow| {
        let measured = row.measured.filter(|_| !row.fitted)?;
        Some((row.group?, row.published.as_ref()?.value, measured.median))
    };
    for (place, row) in rows.iter().enumerate() {
        let Some((group, printed, measured)) = usable(row) else {
            continue;
        };
        for other in rows.iter().skip(place + 1) {
            if let Some((other_group, other_printed, other_measured)) = usable(other)
                && other_group == group
                && printed != other_printed
            {
                let same = (measured - other_measured) * (printed - other_printed) > 0.0;
                out.push(same);
            }
        }
    }
    out
}

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

    fn row(printed: f64, measured: f64, demand: Requirement) -> FindingRow {
        let printed = Published {
            text: printed.to_string(),
            value: printed,
            source: "test".into(),
        };
        FindingRow::new("", "", Measured::counted(measured))
            .beside(printed)
            .require(demand)
    }

    #[test]
    fn verdicts_follow_from_the_rows_alone() {
        use Requirement::*;
        let grouped = |printed, measured, demand| row(printed, measured, demand).ordered_in("g");
        let cases = [
            (vec![], Verdict::NotRun),
            (vec![row(1.0, 9.0, Shown)], Verdict::NotRun),
            (vec![row(1.0, 9.0, Near).fitted()], Verdict::NotRun),
            (vec![row(100.0, 115.0, Near)], Verdict::Reproduced),
            (vec![row(100.0, 85.0, Near)], Verdict::Reproduced),
            (vec![row(100.0, 116.0, Near)], Verdict::Differs),
            (vec![row(3.0, 3.0, Exact)], Verdict::Reproduced),
            (vec![row(3.0, 3.0001, Exact)], Verdict::Differs),
            (
                vec![row(3.0, 4.0, AtLeast), row(3.0, 2.0, AtMost)],
                Verdict::Reproduced,
            ),
            (vec![row(3.0, 2.0, AtLeast)], Verdict::Differs),
            (
                vec![grouped(1.0, 5.0, Near), grouped(2.0, 6.0, Near)],
                Verdict::OrderingOnly,
            ),
            (
                vec![grouped(1.0, 5.0, Shown), grouped(2.0, 6.0, Shown)],
                Verdict::Reproduced,
            ),
            (
                vec![grouped(1.0, 2.0, Shown), grouped(2.0, 1.9, Shown)],
                Verdict::Differs,
            ),
            // A tie in the paper requires nothing. A measured tie where the paper has none is a
            // different order.
            (
                vec![grouped(1.0, 1.0, Near), grouped(1.0, 0.9, Near)],
                Verdict::Reproduced,
            ),
            (
                vec![grouped(1.0, 2.0, Shown), grouped(2.0, 2.0, Shown)],
                Verdict::Differs,
            ),
            (
                vec![grouped(2.0, 2.0, Shown), grouped(1.0, 2.0, Shown)],
                Verdict::Differs,
            ),
        ];
        for (place, (rows, wanted)) in cases.into_iter().enumerate() {
            assert_eq!(Verdict::of(&rows), wanted, "case {place}");
        }
    }

    #[test]
    fn order_is_judged_per_group_without_fitted_rows() {
        let one = row(1.0, 2.0, Requirement::Shown).ordered_in("a");
        let other = row(2.0, 1.0, Requirement::Shown);
        let in_b = other.clone().ordered_in("b");
        assert_eq!(Verdict::of(&[one.clone(), in_b]), Verdict::NotRun);
        let fitted = other.ordered_in("a").fitted();
        assert_eq!(Verdict::of(&[one, fitted]), Verdict::NotRun);
    }

    #[test]
    fn medians_of_even_and_odd_numbers() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), (2.0, 1.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), (2.5, 1.2));
        assert!(median(&[]).0.is_nan());
    }
}
