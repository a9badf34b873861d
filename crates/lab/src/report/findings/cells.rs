//! The cells of a row, as text: the terminal and the page show the same.

use crate::experiments::{Demand, FindingRow};
use crate::report::number::{cycles, percent};

/// Names of the columns.
pub(super) const COLUMNS: [&str; 8] = [
    "what", "printed", "measured", "spread", "ratio", "executed", "charged", "holds",
];

/// A number with as many digits as count.
fn number(value: f64) -> String {
    if !value.is_finite() {
        return "-".into();
    }
    match value.abs() {
        0.0 => "0".into(),
        size if size < 0.01 => format!("{value:.1e}"),
        size if size < 10.0 => {
            let text = format!("{value:.2}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        size if size < 100.0 => format!("{value:.1}").trim_end_matches(".0").to_owned(),
        _ => cycles(value),
    }
}

/// The cells of a row, in the order of [`COLUMNS`].
pub(super) fn cells(row: &FindingRow) -> [String; 8] {
    let unit = match row.unit {
        "" => String::new(),
        unit => format!(" {unit}"),
    };
    let optional = |value: Option<f64>| value.map(number).unwrap_or_default();
    let measured = row.measured;
    let spread = measured.map_or(0.0, |measured| measured.spread);
    [
        row.what.clone(),
        row.printed
            .as_ref()
            .map(|printed| printed.text.clone())
            .unwrap_or_default(),
        measured.map_or_else(
            || "not measured".into(),
            |m| format!("{}{unit}", number(m.median)),
        ),
        if spread > 0.0 {
            format!("±{}", percent(spread / 2.0))
        } else {
            String::new()
        },
        row.ratio
            .map(|ratio| format!("{ratio:.2}"))
            .unwrap_or_default(),
        optional(measured.and_then(|measured| measured.executed)),
        optional(measured.and_then(|measured| measured.charged)),
        holds(row),
    ]
}

/// Whether a row holds what it is held to, in a word or two.
fn holds(row: &FindingRow) -> String {
    let demand = match row.demand {
        Demand::Exact => "exact",
        Demand::Near => "within 15%",
        Demand::AtLeast => "at least",
        Demand::AtMost => "at most",
        Demand::Shown => "",
    };
    match (row.fitted, row.holds) {
        (true, _) => "fitted".into(),
        (_, None) => String::new(),
        (_, Some(true)) => demand.to_owned(),
        (_, Some(false)) => format!("not {demand}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::{Measured, Printed};

    #[test]
    fn rows_read_as_they_are() {
        let printed = Printed {
            text: "~4".into(),
            value: 4.0,
            source: "test".into(),
        };
        let row = FindingRow::new("speed", "Gbit/s", Measured::cost(1500.0, 2150.0, 0.04));
        let row = row.beside(printed).held_to(Demand::AtMost);
        let wanted = [
            "speed",
            "~4",
            "3650 Gbit/s",
            "±2%",
            "912.50",
            "1500",
            "2150",
            "not at most",
        ];
        assert_eq!(cells(&row), wanted);
        for (value, text) in [
            (0.0, "0"),
            (1.5, "1.5"),
            (0.001, "1.0e-3"),
            (12.0, "12"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
