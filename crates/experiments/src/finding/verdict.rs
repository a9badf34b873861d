//! The verdict of a finding and its score, which depend on the rows alone (decision 0013).

use serde::Serialize;

use super::row::{FindingRow, Requirement};

/// Degree to which an experiment reproduced the paper's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Every row passes its requirement, no order is reversed, and at least one holds if the paper
    /// prints any.
    Reproduced,
    /// An order holds and none is reversed, but a number fails a requirement other than
    /// [`Requirement::Exact`].
    OrderingOnly,
    /// A number fails a requirement other than [`Requirement::Exact`], and the rows decide no
    /// order.
    NumbersOff,
    /// Every row passes its requirement, but the paper prints orders of which the rows decide none:
    /// all differences lie within a spread.
    Undecided,
    /// An order is reversed, or an exact number differs.
    Differs,
    /// Not run: the build or the input lacks something that the experiment needs.
    NotRun,
}

impl Verdict {
    /// All verdicts, from the best to the worst.
    pub const ALL: [Self; 6] = [
        Self::Reproduced,
        Self::OrderingOnly,
        Self::Undecided,
        Self::NumbersOff,
        Self::Differs,
        Self::NotRun,
    ];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reproduced => "reproduced",
            Self::OrderingOnly => "ordering only",
            Self::NumbersOff => "numbers off",
            Self::Undecided => "undecided",
            Self::Differs => "differs",
            Self::NotRun => "not run",
        }
    }

    /// Derives the verdict from `rows` alone. Rows that are not judged and groups of fitted or
    /// unmeasured rows are ignored. If no row is judged and no order is decided, the verdict is
    /// [`Verdict::NotRun`].
    pub fn of(rows: &[FindingRow]) -> Self {
        let score = Score::of(rows);
        let OrderScore { held, reversed, .. } = score.orders;
        let exact_fails = rows
            .iter()
            .any(|row| row.requirement == Requirement::Exact && row.holds == Some(false));
        match score.judged {
            _ if exact_fails || reversed > 0 => Self::Differs,
            0 if held == 0 => Self::NotRun,
            judged if score.held == judged && score.orders.asked > 0 && held == 0 => {
                Self::Undecided
            }
            judged if score.held == judged => Self::Reproduced,
            _ if held > 0 => Self::OrderingOnly,
            _ => Self::NumbersOff,
        }
    }
}

/// Numbers of judged rows that hold, of printed numbers that are not judged, and of orders that
/// hold; and the score of the null model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Score {
    /// Rows that are judged.
    pub judged: usize,
    /// Judged rows that pass their requirement.
    pub held: usize,
    /// Rows with a printed number that are not judged.
    pub unjudged: Unjudged,
    /// Orders of pairs of rows.
    pub orders: OrderScore,
    /// Score of the model "protection costs nothing"; `None` if no judged row defines its value.
    pub null_model: Option<NullScore>,
}

/// Rows with a printed number that are not judged, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Unjudged {
    /// Fitted to the paper's number, or computed from printed numbers.
    pub fitted: usize,
    /// Not measured, and not fitted.
    pub unmeasured: usize,
    /// Measured and shown without a requirement.
    pub shown: usize,
}

impl Unjudged {
    /// Rows of all causes.
    pub fn all(&self) -> usize {
        self.fitted + self.unmeasured + self.shown
    }

    /// Counts `row`, which has a printed number.
    fn count(&mut self, row: &FindingRow) {
        *match row {
            _ if row.fitted => &mut self.fitted,
            _ if row.measured.is_none() => &mut self.unmeasured,
            _ => &mut self.shown,
        } += 1;
    }
}

/// Orders of pairs of rows. The rest of `asked` lies within the spread of a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct OrderScore {
    /// Pairs of one group whose printed numbers differ by more than their rounding.
    pub asked: usize,
    /// Pairs in the paper's order.
    pub held: usize,
    /// Pairs in the opposite order.
    pub reversed: usize,
}

/// Score of the model in which protection costs nothing, over the rows that define its value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct NullScore {
    /// Judged rows with a value in the null model.
    pub judged: usize,
    /// Those that the null model's value passes.
    pub held: usize,
    /// Those that the measured value passes.
    pub held_here: usize,
}

impl Score {
    /// Counts the rows, the printed numbers, the orders and the null model's rows.
    pub fn of(rows: &[FindingRow]) -> Self {
        let mut out = Self {
            orders: orders(rows),
            ..Self::default()
        };
        for row in rows {
            let Some(holds) = row.holds else {
                if row.published.is_some() {
                    out.unjudged.count(row);
                }
                continue;
            };
            out.judged += 1;
            out.held += usize::from(holds);
            let Some(null) = row.null_model else {
                continue;
            };
            let passes = row.passes(null.value) == Some(true);
            let score = out.null_model.get_or_insert_default();
            score.judged += 1;
            score.held += usize::from(passes);
            score.held_here += usize::from(holds);
        }
        out
    }
}

/// Room for the binary representation of decimal numbers, relative to the numbers.
const BINARY: f64 = 1e-9;

/// Returns the pairs of rows of a group for which the paper prints an order: its numbers differ by
/// more than both roundings together. The outcome is true if the order holds, false if it is
/// reversed, and `None` if the measured numbers do not differ by more than the larger spread.
pub(crate) fn ordered_pairs(rows: &[FindingRow]) -> Vec<([&FindingRow; 2], Option<bool>)> {
    let usable = rows.iter().filter_map(|row| {
        let measured = row.measured.filter(|_| !row.fitted)?;
        Some((row, row.group?, row.published.as_ref()?, measured))
    });
    let usable: Vec<_> = usable.collect();
    let mut out = Vec::new();
    for (index, (row, group, printed, measured)) in usable.iter().enumerate() {
        for (other_row, other_group, other_printed, other) in usable.iter().skip(index + 1) {
            let wanted = printed.value - other_printed.value;
            let rounding = printed.rounding + other_printed.rounding;
            let binary = BINARY * printed.value.abs().max(other_printed.value.abs());
            if group != other_group || wanted.abs() <= rounding + binary {
                continue;
            }
            let found = measured.median - other.median;
            // An undefined spread (NaN) decides nothing.
            let decided = found.abs() > measured.spread && found.abs() > other.spread;
            let outcome = (decided && found * wanted != 0.0).then_some(found * wanted > 0.0);
            out.push(([*row, *other_row], outcome));
        }
    }
    out
}

/// Counts the pairs of rows by their outcome.
fn orders(rows: &[FindingRow]) -> OrderScore {
    let pairs = ordered_pairs(rows);
    let count = |wanted| pairs.iter().filter(|(_, found)| *found == wanted).count();
    OrderScore {
        asked: pairs.len(),
        held: count(Some(true)),
        reversed: count(Some(false)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{Measured, NullModel, Published};

    fn row(printed: f64, measured: f64, demand: Requirement) -> FindingRow {
        FindingRow::new("", "", Measured::counted(measured))
            .with_published(Published::new(printed.to_string(), printed, "test").rounded_by(0.0))
            .require(demand)
    }

    fn grouped(printed: f64, measured: f64, demand: Requirement) -> FindingRow {
        row(printed, measured, demand).ordered_within("g")
    }

    #[test]
    fn verdicts_follow_from_the_rows_alone() {
        use Requirement::*;
        let cases = [
            (vec![], Verdict::NotRun),
            (vec![row(1.0, 9.0, Shown)], Verdict::NotRun),
            (vec![row(1.0, 9.0, Near).fitted()], Verdict::NotRun),
            (vec![row(100.0, 115.0, Near)], Verdict::Reproduced),
            (vec![row(100.0, 85.0, Near)], Verdict::Reproduced),
            (vec![row(3.0, 3.0, Exact)], Verdict::Reproduced),
            (
                vec![row(3.0, 4.0, AtLeast), row(3.0, 2.0, AtMost)],
                Verdict::Reproduced,
            ),
            // No order and no exact number contradicts the paper.
            (vec![row(100.0, 116.0, Near)], Verdict::NumbersOff),
            (vec![row(3.0, 2.0, AtLeast)], Verdict::NumbersOff),
            (vec![row(3.0, 4.0, AtMost)], Verdict::NumbersOff),
            (
                vec![row(3.0, 3.0, Exact), row(100.0, 116.0, Near)],
                Verdict::NumbersOff,
            ),
            // An exact number does.
            (vec![row(3.0, 3.0001, Exact)], Verdict::Differs),
            (
                vec![row(3.0, 3.1, Exact), row(100.0, 100.0, Near)],
                Verdict::Differs,
            ),
            (
                vec![grouped(1.0, 5.0, Near), grouped(2.0, 6.0, Near)],
                Verdict::OrderingOnly,
            ),
            (
                vec![grouped(1.0, 5.0, Shown), grouped(2.0, 6.0, Shown)],
                Verdict::Reproduced,
            ),
            // So does an order.
            (
                vec![grouped(1.0, 2.0, Shown), grouped(2.0, 1.9, Shown)],
                Verdict::Differs,
            ),
            // A tie in the paper asks for no order. A tie here decides none.
            (
                vec![grouped(1.0, 1.0, Near), grouped(1.0, 0.9, Near)],
                Verdict::Reproduced,
            ),
            (
                vec![grouped(1.0, 2.0, Shown), grouped(2.0, 2.0, Shown)],
                Verdict::NotRun,
            ),
            (
                vec![grouped(1.0, 2.0, Near), grouped(2.0, 2.0, Near)],
                Verdict::NumbersOff,
            ),
            // Numbers that hold do not decide the orders that the paper prints.
            (
                vec![grouped(1.0, 1.05, Near), grouped(1.1, 1.05, Near)],
                Verdict::Undecided,
            ),
            (
                vec![
                    grouped(1.0, 1.05, Near),
                    grouped(1.1, 1.05, Near),
                    grouped(9.0, 9.0, Near),
                ],
                Verdict::Reproduced,
            ),
            (vec![row(3.0, 3.1, Above)], Verdict::Reproduced),
            (vec![row(0.0, 0.0, Above)], Verdict::NumbersOff),
        ];
        for (index, (rows, wanted)) in cases.into_iter().enumerate() {
            assert_eq!(Verdict::of(&rows), wanted, "case {index}");
        }
    }

    #[test]
    fn order_is_judged_per_group_without_fitted_rows() {
        let one = row(1.0, 2.0, Requirement::Shown).ordered_within("a");
        let other = row(2.0, 1.0, Requirement::Shown);
        let in_b = other.clone().ordered_within("b");
        assert_eq!(Verdict::of(&[one.clone(), in_b]), Verdict::NotRun);
        let in_a = other.ordered_within("a");
        assert_eq!(Verdict::of(&[one.clone(), in_a.clone()]), Verdict::Differs);
        assert_eq!(Verdict::of(&[one, in_a.fitted()]), Verdict::NotRun);
    }

    /// Orders of two rows: the printed texts, the measured medians, and their spreads.
    fn order(printed: [&str; 2], medians: [f64; 2], spreads: [f64; 2]) -> (usize, usize, usize) {
        let rows = [0, 1].map(|index| {
            let text = printed[index];
            let value = text.parse().unwrap();
            let measured = Measured::counted(medians[index]).with_spread(spreads[index]);
            FindingRow::new("", "", measured)
                .with_published(Published::new(text, value, "test"))
                .ordered_within("g")
        });
        let OrderScore {
            asked,
            held,
            reversed,
        } = Score::of(&rows).orders;
        (asked, held, reversed)
    }

    #[test]
    fn roundings_of_one_number_ask_for_no_order() {
        // 1.065 rounds to either.
        assert_eq!(order(["1.06", "1.07"], [2.0, 1.0], [0.0; 2]), (0, 0, 0));
        assert_eq!(order(["1.06", "1.08"], [2.0, 1.0], [0.0; 2]), (1, 0, 1));
        assert_eq!(order(["14", "15"], [2.0, 1.0], [0.0; 2]), (0, 0, 0));
        assert_eq!(order(["14.0", "15.0"], [2.0, 1.0], [0.0; 2]), (1, 0, 1));
    }

    #[test]
    fn differences_within_the_larger_spread_decide_no_order() {
        // The second spread is the larger one, and the difference does not exceed it.
        assert_eq!(order(["1", "9"], [70.0, 60.0], [2.0, 10.0]), (1, 0, 0));
        assert_eq!(order(["1", "9"], [70.0, 60.0], [10.0, 2.0]), (1, 0, 0));
        assert_eq!(order(["1", "9"], [70.0, 60.0], [9.9, 9.9]), (1, 0, 1));
        assert_eq!(order(["9", "1"], [70.0, 60.0], [10.0, 2.0]), (1, 0, 0));
        assert_eq!(order(["9", "1"], [70.0, 60.0], [9.9, 9.9]), (1, 1, 0));
        // Nor does an undefined spread of either row.
        assert_eq!(order(["9", "1"], [70.0, 60.0], [f64::NAN, 0.0]), (1, 0, 0));
        assert_eq!(order(["9", "1"], [70.0, 60.0], [0.0, f64::NAN]), (1, 0, 0));
        assert_eq!(order(["1", "9"], [0.0, -60.0], [f64::NAN, 0.0]), (1, 0, 0));
        // Numbers that are no numbers decide nothing.
        assert_eq!(order(["9", "1"], [f64::NAN, 60.0], [0.0; 2]), (1, 0, 0));
    }

    #[test]
    fn null_model_is_scored_over_the_rows_that_define_it() {
        let ratio = |printed: f64, measured| {
            let row = FindingRow::counted("", "", measured);
            let printed = Published::new(format!("{printed:.2}"), printed, "test");
            row.overhead(printed, NullModel::RATIO)
        };
        let null = NullModel::exactly(2.0);
        let rows = [
            ratio(1.5, 1.5),
            ratio(1.5, 1.5),
            ratio(1.5, 1.0),
            ratio(1.0, 1.0),
            row(2.1, 9.0, Requirement::Near).with_null_model(null),
            // Neither judged nor defined.
            ratio(1.0, 1.0).fitted(),
            row(1.0, 1.0, Requirement::Shown).with_null_model(null),
            row(1.0, 1.0, Requirement::Near),
        ];
        let score = Score::of(&rows);
        assert_eq!((score.judged, score.held), (6, 4));
        assert_eq!(score.unjudged.all(), 2);
        let null = NullScore {
            judged: 5,
            held: 2,
            held_here: 3,
        };
        assert_eq!(score.null_model, Some(null));
        assert_eq!(Score::of(&rows[7..]).null_model, None);
    }

    /// A row without a printed number, and a judged one, count nowhere.
    #[test]
    fn printed_numbers_without_a_judgement_are_counted_by_cause() {
        let unmeasured = |demand| FindingRow {
            measured: None,
            ..row(1.0, 1.0, demand)
        };
        let rows = [
            row(1.0, 1.0, Requirement::Near),
            row(1.0, 9.0, Requirement::Near),
            FindingRow::counted("", "", 1.0),
            FindingRow::counted("", "", 1.0).fitted(),
            row(1.0, 1.0, Requirement::Near).fitted(),
            unmeasured(Requirement::Shown).fitted(),
            unmeasured(Requirement::Shown),
            unmeasured(Requirement::Near).judge(),
            unmeasured(Requirement::Exact).judge(),
            row(1.0, 1.0, Requirement::Shown),
            row(1.0, 2.0, Requirement::Shown),
            // An overhead without a value of none.
            row(1.0, 2.0, Requirement::Overhead),
            row(1.0, 2.0, Requirement::Shown),
        ];
        let found = Score::of(&rows);
        let wanted = Unjudged {
            fitted: 2,
            unmeasured: 3,
            shown: 4,
        };
        assert_eq!(found.unjudged, wanted);
        assert_eq!((found.judged, found.unjudged.all()), (2, 9));
    }
}
