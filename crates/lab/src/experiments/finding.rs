//! What an experiment found, beside what the document prints; and the verdict, which follows from
//! the rows alone.

use serde::Serialize;

use super::figure::Figure;

/// How far a ratio may lie from the document's and still be called reproduced.
pub const TOLERANCE: f64 = 0.15;

/// A number of a document.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Published {
    /// As printed.
    pub text: String,
    /// Read as a number.
    pub value: f64,
    /// File, row and column of the bundled table.
    pub source: String,
}

/// A number found here.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measured {
    /// Median of the repetitions; the number itself where it is counted.
    pub median: f64,
    /// Largest less smallest repetition, as a share of the median; 0 where it is counted.
    pub spread: f64,
    /// Of the median, what this processor executed, in the row's unit. `None` where the number is
    /// no cost.
    pub executed: Option<f64>,
    /// Of the median, what the profile charged.
    pub charged: Option<f64>,
}

impl Measured {
    /// A count, or what follows from counts.
    pub const fn counted(value: f64) -> Self {
        Self {
            median: value,
            spread: 0.0,
            executed: None,
            charged: None,
        }
    }

    /// A cost of two parts.
    pub fn cost(executed: f64, charged: f64, spread: f64) -> Self {
        Self {
            median: executed + charged,
            spread,
            executed: Some(executed),
            charged: Some(charged),
        }
    }

    /// A number that timing went into.
    pub const fn timed(median: f64, spread: f64) -> Self {
        Self {
            median,
            spread,
            executed: None,
            charged: None,
        }
    }
}

/// What a row is held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Requirement {
    /// The document's number itself.
    Exact,
    /// The document's number within [`TOLERANCE`].
    Near,
    /// The document's number or more.
    AtLeast,
    /// The document's number or less.
    AtMost,
    /// Nothing: the number stands beside the document's because it is interesting.
    Shown,
}

/// One number.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FindingRow {
    /// What it is.
    pub what: String,
    /// Its unit; empty for ratios.
    pub unit: &'static str,
    /// In the document, if it is printed there.
    pub printed: Option<Published>,
    /// Here; `None` where nothing here can measure it yet.
    pub measured: Option<Measured>,
    /// Measured over printed.
    pub ratio: Option<f64>,
    /// What it is held to.
    pub demand: Requirement,
    /// Whether it holds that; `None` if it is held to nothing.
    pub holds: Option<bool>,
    /// Rows of one group are to be in the document's order.
    pub group: Option<&'static str>,
    /// The one number of a table row that was fitted, and predicts nothing.
    pub fitted: bool,
}

impl FindingRow {
    /// A row that is held to nothing.
    pub fn new(what: impl Into<String>, unit: &'static str, measured: Measured) -> Self {
        Self {
            what: what.into(),
            unit,
            printed: None,
            measured: Some(measured),
            ratio: None,
            demand: Requirement::Shown,
            holds: None,
            group: None,
            fitted: false,
        }
    }

    /// Puts the document's number beside it.
    #[must_use]
    pub fn beside(mut self, printed: Published) -> Self {
        self.printed = Some(printed);
        self.judge()
    }

    /// Holds the row to something.
    #[must_use]
    pub fn require(mut self, demand: Requirement) -> Self {
        self.demand = demand;
        self.judge()
    }

    /// Puts the row into a group whose order counts.
    #[must_use]
    pub fn ordered_in(mut self, group: &'static str) -> Self {
        self.group = Some(group);
        self
    }

    /// Says that the number was fitted to the document's: it is not judged.
    #[must_use]
    pub fn fitted(mut self) -> Self {
        self.fitted = true;
        self.judge()
    }

    fn judge(mut self) -> Self {
        let both = self.printed.as_ref().zip(self.measured);
        self.ratio = both
            // A word has been read as a number; a ratio to it would say nothing.
            .filter(|(printed, _)| {
                printed.value != 0.0 && printed.text.contains(|c: char| c.is_ascii_digit())
            })
            .map(|(printed, measured)| measured.median / printed.value);
        self.holds = both.and_then(|(printed, measured)| {
            let (wanted, found) = (printed.value, measured.median);
            match self.demand {
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

/// How well a document's result came out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Every row holds what it is held to, and every group has the document's order.
    Reproduced,
    /// The groups have the document's order, and numbers are further off than [`TOLERANCE`].
    OrderingOnly,
    /// An order, or an exact number, is another one.
    Differs,
    /// Not run: this build, or what it was given, lacks what it needs.
    NotRun,
}

impl Verdict {
    /// As reports print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reproduced => "reproduced",
            Self::OrderingOnly => "ordering only",
            Self::Differs => "differs",
            Self::NotRun => "not run",
        }
    }

    /// The verdict on `rows`: nothing but their numbers counts. Rows without a demand and groups of
    /// fitted or unmeasured rows say nothing; where no row says anything the experiment has not
    /// run.
    ///
    /// An experiment whose numbers are off and that orders nothing has nothing left to be called
    /// reproduced for: it differs.
    pub fn of(rows: &[FindingRow]) -> Self {
        let judged = rows.iter().filter_map(|row| Some((row, row.holds?)));
        let orders = orders(rows);
        if judged.clone().next().is_none() && orders.is_empty() {
            return Self::NotRun;
        }
        let exact_fails = judged
            .clone()
            .any(|(row, holds)| row.demand == Requirement::Exact && !holds);
        if exact_fails || orders.iter().any(|holds| !holds) {
            return Self::Differs;
        }
        let near = judged
            .clone()
            .filter(|(row, _)| row.demand != Requirement::Exact);
        if near.clone().all(|(_, holds)| holds) {
            Self::Reproduced
        } else if orders.is_empty() {
            Self::Differs
        } else {
            Self::OrderingOnly
        }
    }
}

/// For each pair of rows of a group whose printed numbers differ, whether the measured ones differ
/// in the same sense.
fn orders(rows: &[FindingRow]) -> Vec<bool> {
    let mut out = Vec::new();
    let usable = |row: &FindingRow| {
        let measured = row.measured.filter(|_| !row.fitted)?;
        Some((row.group?, row.printed.as_ref()?.value, measured.median))
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

/// What came of one experiment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// X01 and so on.
    pub id: &'static str,
    /// What it is about.
    pub title: &'static str,
    /// Which document and where in it.
    pub source: &'static str,
    /// What was run, in a sentence or two.
    pub method: String,
    /// The verdict on the rows.
    pub verdict: Verdict,
    /// Why it differs, and what explains the numbers that are off.
    pub explanation: Vec<String>,
    /// Errors of the documents that matter here, assumptions, and what the numbers do not say.
    pub notes: Vec<String>,
    /// The numbers.
    pub rows: Vec<FindingRow>,
    /// Where the document has a figure.
    pub figures: Vec<Figure>,
    /// Seconds it took.
    pub seconds: f64,
}

/// What an experiment returns; [`Experiment::run`](super::Experiment::run) makes a [`Finding`] of
/// it.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// What was run.
    pub method: String,
    /// The numbers.
    pub rows: Vec<FindingRow>,
    /// What explains the numbers that are off.
    pub explanation: Vec<String>,
    /// What matters beside the numbers.
    pub notes: Vec<String>,
    /// Plots.
    pub figures: Vec<Figure>,
}

impl Findings {
    /// Nothing found yet by `method`.
    pub fn with_method(method: impl Into<String>) -> Self {
        Self {
            method: method.into(),
            ..Self::default()
        }
    }

    /// One more row.
    pub fn push(&mut self, row: FindingRow) {
        self.rows.push(row);
    }

    /// One more explanation.
    pub fn explain(&mut self, text: impl Into<String>) {
        self.explanation.push(text.into());
    }

    /// One more note.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }
}

/// Median of `values` and their spread, as a share of it.
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
            // A tie in the document asks for nothing; a tie here where it has none is another
            // order.
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
    fn order_counts_within_a_group_only_and_fitted_rows_do_not_count() {
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
