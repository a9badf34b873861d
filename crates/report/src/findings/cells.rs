//! The cells of a row as text, common to the terminal and the page.

use crate::number::{cycles, percent};
use ringfence_experiments::{FindingRow, Measured, Requirement, Score, Unjudged};

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
/// Index of the column that states whether a row meets its requirement.
pub(super) const HOLDS: usize = 5;
/// Index of the first part of a cost.
pub(super) const FIRST_COST_PART: usize = 6;

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
pub(super) fn cells(row: &FindingRow) -> [String; COLUMNS.len()] {
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
            |m| format!("{}{unit}", measured_text(&m)),
        ),
        spread_text(measured.map_or(0.0, |measured| measured.median), spread),
        row.ratio
            .map(|ratio| format!("{ratio:.2}"))
            .unwrap_or_default(),
        requirement_text(row),
        optional(measured.and_then(|measured| measured.measured_part)),
        optional(measured.and_then(|measured| measured.modelled_part)),
    ]
}

/// Formats a measured number. A cost without a modelled part that is below its spread is noise, and
/// reads `<n`, where n is the spread.
fn measured_text(measured: &Measured) -> String {
    if measured.is_below_resolution() {
        return format!("<{}", number(measured.spread));
    }
    number(measured.median)
}

/// Formats half of the spread: in per cent of the number, or in its unit if it exceeds the number.
fn spread_text(median: f64, spread: f64) -> String {
    let half = spread / 2.0;
    match half {
        _ if half.is_nan() => "undefined".into(),
        _ if half <= 0.0 => String::new(),
        _ if half > median.abs() => format!("±{}", number(half)),
        _ => format!("±{}", percent(half / median.abs())),
    }
}

/// Returns the cells of a score: judged rows that hold, printed numbers that are not judged, and,
/// of the rows with a null model, those that the null model meets and those that hold here. Each is
/// a dash without such rows.
pub(super) fn score_cells(score: &Score) -> [String; 4] {
    let of = |held: usize, judged: usize| match judged {
        0 => "-".into(),
        _ => format!("{held}/{judged}"),
    };
    let null = score.null_model.unwrap_or_default();
    [
        of(score.held, score.judged),
        match score.unjudged.all() {
            0 => "-".into(),
            rows => rows.to_string(),
        },
        of(null.held, null.judged),
        of(null.held_here, null.judged),
    ]
}

/// Formats the whole score in a sentence or two.
pub(super) fn score_text(score: &Score) -> String {
    let mut text = match score.judged {
        0 => "No row is judged.".to_owned(),
        judged => format!("{} of {judged} judged rows hold.", score.held),
    };
    let Unjudged {
        fitted,
        unmeasured,
        shown,
    } = score.unjudged;
    let causes = [
        (fitted, "fitted"),
        (unmeasured, "not measured"),
        (shown, "only shown"),
    ];
    let causes = causes.iter().filter(|(rows, _)| *rows > 0);
    let causes: Vec<String> = causes
        .map(|(rows, cause)| format!("{rows} {cause}"))
        .collect();
    if !causes.is_empty() {
        text.push_str(&format!(
            " Printed numbers that are not judged: {} ({}).",
            score.unjudged.all(),
            causes.join(", ")
        ));
    }
    let orders = score.orders;
    if orders.asked > 0 {
        let open = orders.asked - orders.held - orders.reversed;
        text.push_str(&format!(
            " {} of {} orders hold, {} are reversed, {open} lie within the spread.",
            orders.held, orders.asked, orders.reversed
        ));
    }
    if let Some(null) = score.null_model {
        text.push_str(&format!(
            " If protection cost nothing, {} of {} rows would hold; {} of them hold here.",
            null.held, null.judged, null.held_here
        ));
    }
    text
}

/// Returns the requirement of a row and its outcome, in a word or two.
fn requirement_text(row: &FindingRow) -> String {
    let demand = match row.requirement {
        Requirement::Exact => "exact",
        Requirement::Near => "±15%",
        Requirement::Overhead => "overhead ±15%",
        Requirement::AtLeast => "≥",
        Requirement::Above => ">",
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
    use ringfence_experiments::{NullModel, NullScore, OrderScore, Published};

    #[test]
    fn columns_have_their_indices() {
        assert_eq!(COLUMNS[HOLDS], "holds");
        assert_eq!(COLUMNS[FIRST_COST_PART..], ["measured", "modelled"]);
    }

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
    fn overheads_have_their_own_requirement_and_ratio() {
        let printed = Published::new("1.20", 1.2, "test");
        let row = FindingRow::counted("riommu / none", "", 1.3);
        let cells = cells(&row.overhead(printed, NullModel::RATIO));
        assert_eq!(cells[4..6], ["1.50", "not overhead ±15%"]);
    }

    #[test]
    fn spreads_beyond_the_number_are_in_its_unit() {
        assert_eq!(spread_text(100.0, 4.0), "±2%");
        assert_eq!(spread_text(-100.0, 4.0), "±2%");
        assert_eq!(spread_text(1.0, 40.0), "±20");
        assert_eq!(spread_text(0.0, 40.0), "±20");
        assert_eq!(spread_text(5.0, 0.0), "");
        assert_eq!(spread_text(0.0, f64::NAN), "undefined");
    }

    #[test]
    fn costs_below_their_spread_read_as_such() {
        let text = |measured: Measured, spread| {
            let row = FindingRow::new("", "cycles", measured.with_spread(spread));
            cells(&row)[2].clone()
        };
        assert_eq!(text(Measured::cost(0.0, 0.0, 0.0), 34.0), "<34 cycles");
        assert_eq!(text(Measured::cost(-70.0, 0.0, 0.0), 34.0), "<34 cycles");
        assert_eq!(text(Measured::cost(34.0, 0.0, 0.0), 34.0), "34 cycles");
        // A modelled part is exact, and a count has no resolution.
        assert_eq!(text(Measured::cost(0.0, 8.6, 0.0), 34.0), "8.6 cycles");
        assert_eq!(text(Measured::counted(-2.0), 34.0), "-2 cycles");
    }

    #[test]
    fn scores_read_as_counts() {
        assert_eq!(score_text(&Score::default()), "No row is judged.");
        assert_eq!(score_cells(&Score::default()), ["-"; 4]);
        let score = Score {
            judged: 92,
            held: 63,
            unjudged: Unjudged {
                fitted: 7,
                unmeasured: 0,
                shown: 14,
            },
            orders: OrderScore {
                asked: 9,
                held: 5,
                reversed: 1,
            },
            null_model: Some(NullScore {
                judged: 20,
                held: 2,
                held_here: 11,
            }),
        };
        assert_eq!(score_cells(&score), ["63/92", "21", "2/20", "11/20"]);
        assert_eq!(
            score_text(&score),
            "63 of 92 judged rows hold. Printed numbers that are not judged: 21 (7 fitted, 14 only \
            shown). 5 of 9 orders hold, 1 are reversed, 3 lie within the spread. If protection \
            cost nothing, 2 of 20 rows would hold; 11 of them hold here."
        );
        let unmeasured = Score {
            judged: 4,
            held: 4,
            unjudged: Unjudged {
                unmeasured: 14,
                ..Unjudged::default()
            },
            ..Score::default()
        };
        assert_eq!(score_cells(&unmeasured)[..2], ["4/4", "14"]);
        assert_eq!(
            score_text(&unmeasured),
            "4 of 4 judged rows hold. Printed numbers that are not judged: 14 (14 not measured)."
        );
    }

    #[test]
    fn rows_read_as_they_are() {
        let printed = Published::new("~4", 4.0, "test");
        let measured = Measured::cost(1500.0, 2150.0, 0.0).with_spread(146.0);
        let row = FindingRow::new("speed", "Gbit/s", measured);
        let row = row.with_published(printed).require(Requirement::AtMost);
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
