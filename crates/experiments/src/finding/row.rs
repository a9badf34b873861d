//! Rows of a finding: a measured number next to the printed one, and the comparison of the two.

use serde::Serialize;

/// Relative error up to which a measured number counts as reproduced.
pub const TOLERANCE: f64 = 0.15;

/// A number that a paper prints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Published {
    /// The cell as printed.
    pub text: String,
    /// The number that the cell stands for.
    pub value: f64,
    /// Half of the last printed digit's unit, in the unit of `value`: the paper's own number lies
    /// within this distance. 0 for words.
    pub rounding: f64,
    /// File, row and column of the bundled table.
    pub source: String,
}

impl Published {
    /// The number `value`, printed as `text` in `source`. `rounding` follows from the digits of
    /// `text`.
    pub fn new(text: impl Into<String>, value: f64, source: impl Into<String>) -> Self {
        let text = text.into();
        Self {
            rounding: rounding(&text),
            text,
            value,
            source: source.into(),
        }
    }

    /// The same number with another rounding error, for values that are computed from printed
    /// numbers.
    #[must_use]
    pub fn rounded_by(mut self, rounding: f64) -> Self {
        self.rounding = rounding;
        self
    }
}

/// Returns half a unit of the last digit of the first number in `text`. A trailing `K` stands for
/// thousands. Returns 0 for text without digits.
fn rounding(text: &str) -> f64 {
    let rest = text.trim_start_matches(|c: char| !c.is_ascii_digit());
    let end = rest
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(rest.len());
    let Some((digits, rest)) = rest.split_at_checked(end).filter(|_| end > 0) else {
        return 0.0;
    };
    let decimals = digits.split_once('.').map_or(0, |(_, after)| after.len());
    let unit = if rest.starts_with('K') { 1000.0 } else { 1.0 };
    0.5 * unit * 10_f64.powi(-i32::try_from(decimals).unwrap_or(0))
}

/// A number measured by an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measured {
    /// Median of the repetitions, or the count itself.
    pub median: f64,
    /// Largest minus smallest repetition, in the unit of the row; 0 for counts. NaN if it is
    /// undefined (no repetitions, or a share of 0), so the row is not ordered.
    pub spread: f64,
    /// Measured part of the median, in the unit of the row. `None` if the number is not a cost.
    pub measured_part: Option<f64>,
    /// Part of the median that the profile models, in the unit of the row. `None` if the number is
    /// not a cost.
    pub modelled_part: Option<f64>,
}

/// Returns the spread in the unit of `of`. A share of 0 is undefined unless it is 0 itself.
const fn of_share(share: f64, of: f64) -> f64 {
    if share != 0.0 && of == 0.0 {
        return f64::NAN;
    }
    share * of.abs()
}

impl Measured {
    /// A count, or a number derived from counts.
    pub const fn counted(value: f64) -> Self {
        Self::timed(value, 0.0)
    }

    /// A cost of a measured and a modelled part. `share` is the spread as a share of the measured
    /// part: the modelled part has no spread.
    pub const fn cost(measured: f64, modelled: f64, share: f64) -> Self {
        Self {
            median: measured + modelled,
            spread: of_share(share, measured),
            measured_part: Some(measured),
            modelled_part: Some(modelled),
        }
    }

    /// A number derived from timing, not split into a measured and a modelled part. `share` is the
    /// spread as a share of the number.
    pub const fn timed(median: f64, share: f64) -> Self {
        Self {
            median,
            spread: of_share(share, median),
            measured_part: None,
            modelled_part: None,
        }
    }

    /// The same number with the spread `spread`, in the unit of the row.
    #[must_use]
    pub const fn with_spread(mut self, spread: f64) -> Self {
        self.spread = spread;
        self
    }

    /// Returns true if the number is a cost without a modelled part, and below its spread: noise.
    pub fn is_below_resolution(&self) -> bool {
        let cost = self.measured_part.is_some() && self.modelled_part == Some(0.0);
        cost && self.median < self.spread
    }

    /// The same number in another unit: all parts and the spread times `factor`.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        Self {
            median: factor * self.median,
            spread: factor.abs() * self.spread,
            measured_part: self.measured_part.map(|part| factor * part),
            modelled_part: self.modelled_part.map(|part| factor * part),
        }
    }

    /// The same cost with `modelled` added to its modelled part. The spread stays.
    #[must_use]
    pub fn plus_modelled(self, modelled: f64) -> Self {
        Self {
            median: self.median + modelled,
            modelled_part: self.modelled_part.map(|part| part + modelled),
            ..self
        }
    }
}

/// Value of a row in the null model "protection costs nothing": every ratio is 1, and every
/// latency is that of `none`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NullModel {
    /// The value, in the unit of the row.
    pub value: f64,
    /// Rounding error of the value if a paper prints it; otherwise 0.
    pub rounding: f64,
}

impl NullModel {
    /// The value of ratios of two modes: 1.
    pub const RATIO: Self = Self::exactly(1.0);

    /// A value that no paper prints.
    pub const fn exactly(value: f64) -> Self {
        Self {
            value,
            rounding: 0.0,
        }
    }

    /// The value of `none` as a paper prints it.
    pub const fn printed(none: &Published) -> Self {
        Self {
            value: none.value,
            rounding: none.rounding,
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
    /// The distance from the row's [`NullModel`] is within [`TOLERANCE`] of the paper's distance,
    /// plus the rounding of the printed numbers: ratio - 1, or microseconds beyond none.
    Overhead,
    /// At least the paper's number.
    AtLeast,
    /// Above the paper's number, and not equal to it.
    Above,
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
    /// Measured over printed, of the distances from `null_model` if the row judges an overhead.
    /// `None` if either is missing, if the printed cell has no digits, or if the divisor is 0.
    pub ratio: Option<f64>,
    /// Comparison that the row must pass.
    pub requirement: Requirement,
    /// True if the row passes `requirement`; `None` if it is not judged.
    pub holds: Option<bool>,
    /// Value of the row if protection cost nothing; `None` where that is undefined.
    pub null_model: Option<NullModel>,
    /// Configuration within which the paper's order of the rows counts; `None` if the order does
    /// not count.
    pub group: Option<&'static str>,
    /// True if this number was fitted to the paper's or computed from printed numbers: it predicts
    /// nothing and is not judged.
    pub fitted: bool,
}

impl FindingRow {
    /// A row without a printed number and without a requirement.
    pub fn new(quantity: impl Into<String>, unit: &'static str, measured: Measured) -> Self {
        Self {
            quantity: quantity.into(),
            unit,
            published: None,
            measured: Some(measured),
            ratio: None,
            requirement: Requirement::Shown,
            holds: None,
            null_model: None,
            group: None,
            fitted: false,
        }
    }

    /// A row of a count, without a printed number and without a requirement.
    pub fn counted(quantity: impl Into<String>, unit: &'static str, value: f64) -> Self {
        Self::new(quantity, unit, Measured::counted(value))
    }

    /// Adds the paper's number, which the row must equal.
    #[must_use]
    pub fn exact(self, printed: Published) -> Self {
        self.with_published(printed).require(Requirement::Exact)
    }

    /// Adds the paper's number, from which the row may differ by [`TOLERANCE`].
    #[must_use]
    pub fn near(self, printed: Published) -> Self {
        self.with_published(printed).require(Requirement::Near)
    }

    /// Adds the paper's number and the value without a cost of protection. The row's distance from
    /// that value may differ by [`TOLERANCE`] from the paper's.
    #[must_use]
    pub fn overhead(self, printed: Published, null_model: NullModel) -> Self {
        let row = self.with_published(printed).with_null_model(null_model);
        row.require(Requirement::Overhead)
    }

    /// Adds the paper's number, which the row must reach.
    #[must_use]
    pub fn at_least(self, printed: Published) -> Self {
        self.with_published(printed).require(Requirement::AtLeast)
    }

    /// Adds the paper's number, which the row must not exceed.
    #[must_use]
    pub fn at_most(self, printed: Published) -> Self {
        self.with_published(printed).require(Requirement::AtMost)
    }

    /// Adds the paper's number. The requirement does not change.
    #[must_use]
    pub fn with_published(mut self, printed: Published) -> Self {
        self.published = Some(printed);
        self.judge()
    }

    /// Sets the requirement of the row.
    #[must_use]
    pub fn require(mut self, requirement: Requirement) -> Self {
        self.requirement = requirement;
        self.judge()
    }

    /// Adds the row's value if protection cost nothing.
    #[must_use]
    pub fn with_null_model(mut self, null_model: NullModel) -> Self {
        self.null_model = Some(null_model);
        self.judge()
    }

    /// Lets the paper's order count among the rows of one configuration: one quantity of one
    /// workload on one machine, in modes or sizes that the rows compare. Rows of two workloads,
    /// machines or quantities belong to two groups.
    #[must_use]
    pub fn ordered_within(mut self, configuration: &'static str) -> Self {
        self.group = Some(configuration);
        self
    }

    /// Marks the number as fitted to the paper's, or as computed from printed numbers. This exempts
    /// it from judgement.
    #[must_use]
    pub fn fitted(mut self) -> Self {
        self.fitted = true;
        self.judge()
    }

    /// Returns true if `value` in place of the measured number would pass the requirement; `None`
    /// if the row is not judged.
    pub(crate) fn passes(&self, value: f64) -> Option<bool> {
        let printed = self.published.as_ref().filter(|_| !self.fitted)?;
        let wanted = printed.value;
        let off = (value - wanted).abs();
        match self.requirement {
            Requirement::Shown => None,
            Requirement::Exact => Some(value == wanted),
            Requirement::Near => Some(off <= TOLERANCE * wanted.abs()),
            Requirement::Overhead => self.null_model.map(|null| {
                let overhead = (wanted - null.value).abs();
                off <= TOLERANCE * overhead + printed.rounding + null.rounding
            }),
            Requirement::AtLeast => Some(value >= wanted),
            Requirement::Above => Some(value > wanted),
            Requirement::AtMost => Some(value <= wanted),
        }
    }

    /// Derives `ratio` and `holds` from the other fields.
    pub(super) fn judge(mut self) -> Self {
        let both = self.published.as_ref().zip(self.measured);
        let overhead = self.requirement == Requirement::Overhead;
        let base = self.null_model.filter(|_| overhead);
        let base = base.map_or(0.0, |null| null.value);
        self.ratio = both
            // Some cells are words that `read_as` maps to a number; a ratio to it means nothing.
            .filter(|(printed, _)| {
                printed.value != base && printed.text.contains(|c: char| c.is_ascii_digit())
            })
            .map(|(printed, measured)| (measured.median - base) / (printed.value - base));
        self.holds = self
            .measured
            .and_then(|measured| self.passes(measured.median));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_digit_gives_the_rounding() {
        let cases = [
            ("1.06", 0.005),
            ("34.6", 0.05),
            ("3986", 0.5),
            ("~4", 0.5),
            (">6", 0.5),
            ("12K", 500.0),
            ("+26", 0.5),
            ("20-60", 0.5),
            ("0.80", 0.005),
            ("words", 0.0),
            ("", 0.0),
        ];
        for (text, wanted) in cases {
            let found = Published::new(text, 1.0, "test").rounding;
            assert!((found - wanted).abs() < 1e-12, "{text}: {found}");
        }
        assert_eq!(
            Published::new("1.06", 1.06, "").rounded_by(2.0).rounding,
            2.0
        );
    }

    #[test]
    fn overheads_are_judged_and_not_the_ratios_near_one() {
        let row = |printed: f64, measured| {
            let printed = Published::new(format!("{printed:.2}"), printed, "test");
            let row = FindingRow::new("", "", Measured::counted(measured));
            row.overhead(printed, NullModel::RATIO)
        };
        for (printed, measured, holds) in [
            // 15% of 0.2 and half of the last digit: 0.035.
            (1.2, 1.2, true),
            (1.2, 1.234, true),
            (1.2, 1.236, false),
            (1.2, 1.0, false),
            (0.77, 0.8, true),
            (0.77, 0.82, false),
            // The wrong side of 1, though within 15% of the ratio.
            (1.05, 0.983, false),
            // A tie in the paper leaves the rounding.
            (1.0, 1.004, true),
            (1.0, 1.006, false),
        ] {
            let found = row(printed, measured);
            assert_eq!(found.holds, Some(holds), "{printed} {measured}");
        }
        assert!((row(1.2, 1.3).ratio.unwrap() - 1.5).abs() < 1e-9);
        assert_eq!(row(1.0, 1.3).ratio, None);
        // The number without protection is printed as well, and rounded.
        let none = Published::new("13.4", 13.4, "test");
        let us = |measured| {
            let row = FindingRow::new("", "us", Measured::counted(measured));
            let printed = Published::new("13.9", 13.9, "test");
            row.overhead(printed, NullModel::printed(&none)).holds
        };
        assert_eq!(
            [us(14.07), us(14.08), us(13.4)],
            [Some(true), Some(false), Some(false)]
        );
    }

    #[test]
    fn fitted_and_shown_rows_are_not_judged() {
        let row = || FindingRow::counted("", "", 9.0).near(Published::new("1", 1.0, "test"));
        assert_eq!(row().holds, Some(false));
        assert_eq!(row().fitted().holds, None);
        assert_eq!(row().require(Requirement::Shown).holds, None);
        // An overhead over nothing is not defined.
        assert_eq!(row().require(Requirement::Overhead).holds, None);
    }

    #[test]
    fn spread_is_in_the_unit_of_the_row() {
        assert_eq!(Measured::timed(-8.0, 0.25).spread, 2.0);
        // A share of 0 says nothing about the spread.
        assert!(Measured::timed(0.0, 0.25).spread.is_nan());
        assert!(Measured::cost(0.0, 2150.0, 0.1).spread.is_nan());
        assert_eq!(Measured::counted(0.0).spread, 0.0);
        // The modelled part has no spread.
        let cost = Measured::cost(100.0, 2150.0, 0.1);
        assert_eq!(cost.spread, 10.0);
        let latency = cost.scaled(0.01).plus_modelled(13.0);
        assert_eq!((latency.median, latency.spread), (35.5, 0.1));
        assert_eq!(latency.modelled_part, Some(34.5));
        assert_eq!(cost.with_spread(3.0).spread, 3.0);
    }
}
