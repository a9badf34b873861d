//! The cells of a row as text, common to the terminal and the page.

use crate::number::{cycles, percent};
use ringfence_experiments::{FindingRow, Requirement};

/// Names of the columns. If `here` is a cost, the last two are its parts.
pub(super) const COLUMNS: [&str; 8] = [
    "quantity",
    "published",
    "here",
    "spread",
    "ratio",
    "holds",
    "measured",
    "modelled",
];

/// Adjacent rows with a common heading.
#[derive(Debug, PartialEq)]
pub(super) struct Group<'a> {
    /// Common prefix of their names; `None` without one.
    pub(super) heading: Option<&'a str>,
    /// Rows, each with the rest of its name.
    pub(super) rows: Vec<(&'a str, &'a FindingRow)>,
}

/// Groups adjacent rows whose names share a prefix up to a colon under that prefix. Other rows form
/// groups without a heading.
pub(super) fn groups(rows: &[FindingRow]) -> Vec<Group<'_>> {
    let beginning = |row: &FindingRow| row.quantity.find(": ");
    let alike = |one: &FindingRow, other: &FindingRow| {
        beginning(one).is_some_and(|end| {
            beginning(other) == Some(end) && one.quantity.get(..end) == other.quantity.get(..end)
        })
    };
    let mut out: Vec<Group<'_>> = Vec::new();
    for rows in rows.chunk_by(alike) {
        let end = rows.first().and_then(beginning).filter(|_| rows.len() > 1);
        let named = rows.iter().map(|row| {
            let rest = end.and_then(|end| row.quantity.get(end + 2..));
            (rest.unwrap_or(row.quantity.as_str()), row)
        });
        let heading = end.and_then(|end| rows.first()?.quantity.get(..end));
        match out.last_mut() {
            Some(Group {
                heading: None,
                rows,
            }) if heading.is_none() => rows.extend(named),
            _ => out.push(Group {
                heading,
                rows: named.collect(),
            }),
        }
    }
    out
}

/// Formats a number with its significant digits.
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

/// Returns the cells of a row, in the order of [`COLUMNS`].
pub(super) fn cells(row: &FindingRow) -> [String; 8] {
    let unit = match row.unit {
        "" => String::new(),
        unit => format!(" {unit}"),
    };
    let optional = |value: Option<f64>| value.map(number).unwrap_or_default();
    let measured = row.measured;
    let spread = measured.map_or(0.0, |measured| measured.spread);
    [
        row.quantity.clone(),
        row.published
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
        requirement_text(row),
        optional(measured.and_then(|measured| measured.measured_part)),
        optional(measured.and_then(|measured| measured.modelled_part)),
    ]
}

/// Returns the requirement of a row and its outcome, in a word or two.
fn requirement_text(row: &FindingRow) -> String {
    let demand = match row.requirement {
        Requirement::Exact => "exact",
        Requirement::Near => "±15%",
        Requirement::AtLeast => "≥",
        Requirement::AtMost => "≤",
        Requirement::Shown => "",
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
    use ringfence_experiments::{Measured, Published};

    #[test]
    fn rows_that_begin_alike_stand_under_one_heading() {
        let rows: Vec<FindingRow> = ["alone", "a: x", "a: y", "b: x", "a: z: 1", "a: z: 2"]
            .map(|what| FindingRow::new(what, "", Measured::counted(0.0)))
            .to_vec();
        let got: Vec<(Option<&str>, Vec<&str>)> = groups(&rows)
            .into_iter()
            .map(|group| {
                let names = group.rows.into_iter().map(|(name, _)| name);
                (group.heading, names.collect())
            })
            .collect();
        let wanted = [
            (None, vec!["alone"]),
            (Some("a"), vec!["x", "y"]),
            (None, vec!["b: x"]),
            (Some("a"), vec!["z: 1", "z: 2"]),
        ];
        assert_eq!(got, wanted);
        assert!(groups(&[]).is_empty());
    }

    #[test]
    fn rows_read_as_they_are() {
        let printed = Published {
            text: "~4".into(),
            value: 4.0,
            source: "test".into(),
        };
        let row = FindingRow::new("speed", "Gbit/s", Measured::cost(1500.0, 2150.0, 0.04));
        let row = row.beside(printed).require(Requirement::AtMost);
        let wanted = [
            "speed",
            "~4",
            "3650 Gbit/s",
            "±2%",
            "912.50",
            "not ≤",
            "1500",
            "2150",
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
