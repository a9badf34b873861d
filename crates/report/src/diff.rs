//! Compares two reports and lists the changes from one run to the next.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::condition::{names, number};
use super::grid::{Cell, CellStyle, Column, Grid, TableStyle};
use super::number::{count, cycles, or_dash};
use ringfence_lab::row::SCHEMA;
use ringfence_trace::printable_line;

/// The reason why a file cannot be compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiffError {
    /// The file is not JSON.
    #[error("not JSON: {0}")]
    Json(serde_json::Error),
    /// The file is JSON, but not a report of `compare --json`.
    #[error("not a report of `ringfence compare --json`")]
    NotAReport,
    /// The report has another version of the form.
    #[error("report of schema {0}; this program reads schema {SCHEMA}")]
    Schema(u64),
}

/// A number that changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Path of the field.
    pub field: String,
    /// Value in the first report.
    pub before: f64,
    /// Value in the second report.
    pub after: f64,
}

/// The difference of a row that both reports have.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowDiff {
    /// Name of the trace.
    pub trace: String,
    /// Name of the mode.
    pub mode: String,
    /// Cycles of a map and an unmap in the first report; `None` if it did not measure them.
    pub cycles_before: Option<f64>,
    /// The same in the second report.
    pub cycles_after: Option<f64>,
    /// `after / before`; `None` if a report did not measure it, or `before` is not above 0.
    pub cycles_ratio: Option<f64>,
    /// Changed fields that two runs over the same trace should agree on: all except cycles and
    /// values derived from them.
    pub changes: Vec<Change>,
    /// Fields that a verdict needs and at least one report did not measure.
    pub not_measured: Vec<&'static str>,
}

/// The reason why two reports give no verdict: a row and the fields that it lacks. `None` if the
/// reports have no row in common.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}", incomparable(.0.as_ref()))]
pub struct IncomparableRow(pub Option<(String, Vec<&'static str>)>);

fn incomparable(row: Option<&(String, Vec<&'static str>)>) -> String {
    let Some((row, fields)) = row else {
        return "the reports have no row in common".into();
    };
    format!(
        "{row}: {} not measured in both reports; compare with --repeat above 0 and with the \
        attacker",
        fields.join(", ")
    )
}

/// The fields that a verdict needs.
const JUDGED: [&str; 5] = [
    "map_cycles",
    "unmap_cycles",
    "violations",
    "false_faults",
    "colocated",
];

/// Clock noise in the cycles of a map and an unmap. Ratios to smaller values mean nothing: modes
/// without work cost about 0.
const NOISE_CYCLES: f64 = 10.0;

/// The difference of two reports.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Diff {
    /// Rows of both reports.
    pub rows: Vec<RowDiff>,
    /// `trace mode` of rows that only the first report has.
    pub only_before: Vec<String>,
    /// `trace mode` of rows that only the second report has.
    pub only_after: Vec<String>,
}

/// Returns true for fields that vary from run to run.
fn is_timing(field: &str) -> bool {
    field.starts_with("components.")
        || matches!(
            field,
            "map_cycles"
                | "unmap_cycles"
                | "modelled_share"
                | "relative_throughput"
                | "processor_throughput"
                | "limited_by"
        )
}

fn rows(text: &str) -> Result<Vec<(String, String, Value)>, DiffError> {
    let report: Value = serde_json::from_str(text).map_err(DiffError::Json)?;
    let schema = report.get("schema").and_then(Value::as_u64);
    match schema {
        Some(schema) if schema == u64::from(SCHEMA) => {}
        Some(other) => return Err(DiffError::Schema(other)),
        None => return Err(DiffError::NotAReport),
    }
    let results = report.get("results").and_then(Value::as_array);
    let results = results.ok_or(DiffError::NotAReport)?;
    results
        .iter()
        .map(|row| {
            let text = |key: &str| row.get(key).and_then(Value::as_str).map(str::to_owned);
            match (text("trace"), text("mode")) {
                (Some(trace), Some(mode)) => Ok((trace, mode, row.clone())),
                _ => Err(DiffError::NotAReport),
            }
        })
        .collect()
}

impl Diff {
    /// Compares two reports in their JSON form.
    ///
    /// # Errors
    /// The index (0 or 1) of the report that cannot be read, and the reason.
    pub fn of(before: &str, after: &str) -> Result<Self, (usize, DiffError)> {
        let before = rows(before).map_err(|e| (0, e))?;
        let after = rows(after).map_err(|e| (1, e))?;
        let mut indices: HashMap<(&str, &str), VecDeque<usize>> = HashMap::new();
        for (index, (trace, mode, _)) in after.iter().enumerate() {
            indices.entry((trace, mode)).or_default().push_back(index);
        }
        let mut diff = Self::default();
        for (trace, mode, old) in &before {
            let same = indices.get_mut(&(trace.as_str(), mode.as_str()));
            let same = same.and_then(VecDeque::pop_front);
            match same.and_then(|index| after.get(index)) {
                Some((_, _, new)) => {
                    let row = RowDiff::of(trace.clone(), mode.clone(), old, new);
                    diff.rows.push(row);
                }
                None => diff.only_before.push(format!("{trace} {mode}")),
            }
        }
        let mut rest: Vec<usize> = indices.into_values().flatten().collect();
        rest.sort_unstable();
        let rest = rest.into_iter().filter_map(|index| after.get(index));
        let rest = rest.map(|(trace, mode, _)| format!("{trace} {mode}"));
        diff.only_after = rest.collect();
        Ok(diff)
    }

    /// Returns a line for each row that costs more than `percent` per cent more than before,
    /// exposes more, or is missing in the second report.
    ///
    /// # Errors
    /// The reports have no row in common, or one report did not measure a field that the verdict
    /// needs: cycles or exposure.
    pub fn worse_by(&self, percent: f64) -> Result<Vec<String>, IncomparableRow> {
        if self.rows.is_empty() {
            return Err(IncomparableRow(None));
        }
        for row in &self.rows {
            if !row.not_measured.is_empty() {
                let name = format!("{}, {}", row.trace, row.mode);
                return Err(IncomparableRow(Some((name, row.not_measured.clone()))));
            }
        }
        let rows = self.rows.iter();
        let worse = rows.filter(|row| row.costs_more_by(percent) || row.is_less_safe());
        let lost = self.only_before.iter();
        let lost = lost.map(|row| format!("{row}: the second report does not have it"));
        Ok(worse.map(RowDiff::to_string).chain(lost).collect())
    }

    /// Formats the difference as a table.
    pub fn table(&self, look: TableStyle) -> String {
        let mut grid = Grid::new(&[
            Column::left("trace"),
            Column::left("mode"),
            Column::right("cycles of a map and an unmap", "before"),
            Column::right("cycles of a map and an unmap", "after"),
            Column::right("cycles of a map and an unmap", "ratio"),
            Column::left("other changes"),
        ]);
        for row in &self.rows {
            let changed: Vec<String> = row.changes.iter().map(Change::to_string).collect();
            grid.rows.push(vec![
                Cell::new(&row.trace),
                Cell::toned(&row.mode, CellStyle::Strong),
                Cell::new(or_dash(row.cycles_before, cycles)),
                Cell::new(or_dash(row.cycles_after, cycles)),
                Cell::new(or_dash(row.cycles_ratio, |ratio| format!("{ratio:.3}"))),
                match changed.is_empty() {
                    true => Cell::toned("-", CellStyle::Faint),
                    false => Cell::toned(changed.join(", "), CellStyle::Bad),
                },
            ]);
        }
        let mut out = grid.render(look);
        for (rows, which) in [(&self.only_before, "first"), (&self.only_after, "second")] {
            if !rows.is_empty() {
                let rows = rows.join(", ");
                out.push_str(&format!("only in the {which}: {}\n", printable_line(&rows)));
            }
        }
        out
    }
}

impl RowDiff {
    fn of(trace: String, mode: String, old: &Value, new: &Value) -> Self {
        let sum = |row: &Value| Some(number(row, "map_cycles")? + number(row, "unmap_cycles")?);
        let (before, after) = (sum(old), sum(new));
        let lacks = |field: &&str| number(old, field).is_none() || number(new, field).is_none();
        let not_measured = JUDGED.into_iter().filter(lacks).collect();
        let mut fields = Vec::new();
        names(old, "", &mut fields);
        let changes = fields
            .into_iter()
            .filter(|field| !is_timing(field))
            .filter_map(|field| {
                // A field that only one version has is not a change between runs.
                let (before, after) = (number(old, &field)?, number(new, &field)?);
                (before != after).then_some(Change {
                    field,
                    before,
                    after,
                })
            })
            .collect();
        Self {
            trace,
            mode,
            cycles_before: before,
            cycles_after: after,
            cycles_ratio: before
                .zip(after)
                .filter(|(before, _)| *before > 0.0)
                .map(|(before, after)| after / before),
            changes,
            not_measured,
        }
    }

    fn costs_more_by(&self, percent: f64) -> bool {
        self.cycles_before
            .zip(self.cycles_after)
            .is_some_and(|(before, after)| {
                let base = before.max(NOISE_CYCLES);
                after > base * (1.0 + percent / 100.0)
            })
    }

    /// Returns true if the IOMMU let more accesses through, or stopped more legal ones, than
    /// before.
    fn is_less_safe(&self) -> bool {
        self.changes.iter().any(|change| {
            matches!(
                change.field.as_str(),
                "violations" | "false_faults" | "colocated"
            ) && change.after > change.before
        })
    }
}

impl fmt::Display for RowDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}: ", self.trace, self.mode)?;
        match self.cycles_ratio {
            Some(ratio) => write!(f, "{ratio:.3} times the cycles")?,
            None => write!(
                f,
                "{} cycles, {} before",
                or_dash(self.cycles_after, cycles),
                or_dash(self.cycles_before, cycles)
            )?,
        }
        for change in &self.changes {
            write!(f, ", {change}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: f64| {
            if value.fract() == 0.0 && (0.0..1e15).contains(&value) {
                count(value as u64)
            } else {
                format!("{value:.6}")
            }
        };
        write!(
            f,
            "{} {} -> {}",
            self.field,
            value(self.before),
            value(self.after)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_lab::row::{Row, Violations};

    fn report(rows: &[Row]) -> String {
        serde_json::json!({ "schema": SCHEMA, "results": rows }).to_string()
    }

    fn row(mode: &str, cycles: f64, violations: u64) -> Row {
        Row {
            trace: "t".into(),
            mode: mode.into(),
            map_cycles: Some(cycles),
            violations: Some(Violations {
                stale: violations,
                total: violations,
                ..Violations::default()
            }),
            ..Row::of_run(true, true)
        }
    }

    fn judged(before: &[Row], after: &[Row]) -> Result<Vec<String>, IncomparableRow> {
        let diff = Diff::of(&report(before), &report(after)).unwrap();
        diff.worse_by(20.0)
    }

    #[test]
    fn a_row_that_is_lost_or_not_measured_does_not_pass() {
        let good = || row("a", 100.0, 0);
        assert_eq!(judged(&[good()], &[good()]), Ok(Vec::new()));
        let worse = judged(&[good(), row("b", 1.0, 0)], &[good()]).unwrap();
        assert_eq!(worse.len(), 1);
        assert!(worse[0].starts_with("t b: "), "{worse:?}");
        // A new row is not a regression.
        assert_eq!(
            judged(&[good()], &[good(), row("b", 1.0, 9)]),
            Ok(Vec::new())
        );
        for (timed, attack, field) in [(false, true, "map_cycles"), (true, false, "violations")] {
            let unmeasured = || Row {
                trace: "t".into(),
                mode: "a".into(),
                ..Row::of_run(timed, attack)
            };
            for (before, after) in [
                (good(), unmeasured()),
                (unmeasured(), good()),
                (unmeasured(), unmeasured()),
            ] {
                let error = judged(&[before], &[after]).unwrap_err().to_string();
                assert!(error.contains(field), "{error}");
            }
        }
        for (before, after) in [(vec![], vec![]), (vec![good()], vec![])] {
            assert_eq!(judged(&before, &after), Err(IncomparableRow(None)));
        }
    }

    #[test]
    fn zero_cost_can_regress() {
        let worse = |before, after| judged(&[row("a", before, 0)], &[row("a", after, 0)]).unwrap();
        for (before, after, is_worse) in [
            (0.0, 4000.0, true),
            (-1.0, 4000.0, true),
            (-0.4, 2.0, false),
            (1.0, 5.0, false),
            (9.0, 13.0, true),
            (100.0, 119.0, false),
            (100.0, 121.0, true),
        ] {
            assert_eq!(
                worse(before, after).len(),
                usize::from(is_worse),
                "{before} {after}"
            );
        }
    }

    #[test]
    fn rows_are_matched_by_trace_and_mode() {
        let before = report(&[row("a", 100.0, 0), row("b", 50.0, 0), row("c", 1.0, 0)]);
        let after = report(&[row("d", 1.0, 0), row("b", 50.0, 2), row("a", 130.0, 0)]);
        let diff = Diff::of(&before, &after).unwrap();
        assert_eq!(diff.only_before, ["t c"]);
        assert_eq!(diff.only_after, ["t d"]);
        assert_eq!(diff.rows[0].cycles_ratio, Some(1.3));
        assert!(diff.rows[0].changes.is_empty());
        let changed: Vec<&str> = diff.rows[1]
            .changes
            .iter()
            .map(|c| c.field.as_str())
            .collect();
        assert_eq!(
            changed,
            ["violations", "violations.stale", "violations.total"]
        );
        let worse = |percent| {
            let rows = diff.worse_by(percent).unwrap();
            let name = |row: &String| row.split(':').next().unwrap().to_owned();
            rows.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(worse(20.0), ["t, a", "t, b", "t c"]);
        assert_eq!(worse(40.0), ["t, b", "t c"]);
    }

    #[test]
    fn other_files_are_refused() {
        let good = report(&[]);
        let cases = [
            ("", "not JSON"),
            ("{}", "not a report"),
            ("[1]", "not a report"),
            (r#"{"schema":3,"results":[{}]}"#, "not a report"),
            (r#"{"schema":2,"results":[]}"#, "schema 2"),
            (r#"{"schema":999,"results":[]}"#, "schema 999"),
        ];
        for (text, expected) in cases {
            let (which, error) = Diff::of(&good, text).unwrap_err();
            assert_eq!(which, 1);
            assert!(error.to_string().contains(expected), "{text}: {error}");
        }
    }
}
