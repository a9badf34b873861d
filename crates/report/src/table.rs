//! Rows as a table of typed columns: one for each number and text of the JSON row.

use std::collections::HashMap;

use ringfence_attack::expect::Outcome;
use ringfence_attack::{Evidence, Matrix, Status};
use ringfence_lab::row::Row;
use serde::Serialize;
use serde_json::Value;

use super::Report;

/// Type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CellType {
    /// True or false.
    Bool,
    /// Unsigned integers of 64 bits.
    Unsigned,
    /// Floating-point numbers of 64 bits.
    Float,
    /// Strings of characters.
    Text,
}

/// One column of a report's table.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// Path of the field in the JSON row. Dots name nested fields: `violations.total`,
    /// `walk_cache_hit_rate.0`.
    pub name: String,
    /// Type of the cells.
    pub cell_type: CellType,
    /// One cell for each row: a value of the type, or null if it was not measured.
    pub cells: Vec<Value>,
}

/// The columns of a report's rows. They do not depend on the rows.
pub fn report_table(report: &Report) -> Vec<Column> {
    row_table(&report.results)
}

/// The columns of `rows`.
pub(super) fn row_table(rows: &[Row]) -> Vec<Column> {
    // A row with every optional field.
    table_of(&Row::of_run(true, true), rows)
}

/// The columns of an attack matrix: a row for each cell, with the sums of the counts that decide.
pub fn attack_table(matrix: &Matrix) -> Vec<Column> {
    let lines = matrix.cells.iter().map(|cell| AttackLine {
        class: cell.class,
        mode: &cell.mode,
        status: Some(cell.status),
        reason: cell.reason,
        expected: cell.expected,
        departure: cell.departure,
        exceeds_bound: cell.exceeds_bound,
        unexpected: cell.unexpected,
        total: cell.total,
    });
    let full = AttackLine {
        total: Evidence {
            last_success_ns: Some(0),
            last_success_unmaps: Some(0),
            ..Evidence::default()
        },
        ..AttackLine::default()
    };
    table_of(&full, &lines.collect::<Vec<_>>())
}

/// A cell of the attack matrix, without the counts of its variants.
#[derive(Default, Serialize)]
struct AttackLine<'a> {
    class: &'a str,
    mode: &'a str,
    status: Option<Status>,
    reason: Option<&'a str>,
    expected: Option<Outcome>,
    departure: Option<&'a str>,
    exceeds_bound: bool,
    unexpected: bool,
    total: Evidence,
}

/// Returns the columns of `rows`: the fields of `full`, a row with every optional field. A field
/// that is null there has text.
pub(super) fn table_of(full: &impl Serialize, rows: &[impl Serialize]) -> Vec<Column> {
    let leaves_of = |row: serde_json::Result<Value>| {
        let mut leaves = Vec::new();
        flatten(row.unwrap_or_default(), String::new(), &mut leaves);
        leaves
    };
    let mut columns: Vec<Column> = leaves_of(serde_json::to_value(full))
        .into_iter()
        .map(|(name, value)| Column {
            name,
            cell_type: match value {
                Value::Bool(_) => CellType::Bool,
                Value::Number(number) if number.is_f64() => CellType::Float,
                Value::Number(_) => CellType::Unsigned,
                _ => CellType::Text,
            },
            cells: Vec::with_capacity(rows.len()),
        })
        .collect();
    for row in rows {
        let mut leaves: HashMap<String, Value> =
            leaves_of(serde_json::to_value(row)).into_iter().collect();
        for column in &mut columns {
            let cell = leaves.remove(&column.name).unwrap_or_default();
            column.cells.push(cell);
        }
    }
    columns
}

fn flatten(value: Value, path: String, leaves: &mut Vec<(String, Value)>) {
    let join = |key: &str| match path.as_str() {
        "" => key.to_owned(),
        _ => format!("{path}.{key}"),
    };
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                flatten(value, join(&key), leaves);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.into_iter().enumerate() {
                flatten(value, join(&index.to_string()), leaves);
            }
        }
        leaf => leaves.push((path, leaf)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_have_the_types_of_the_fields() {
        let columns = row_table(&[Row::default()]);
        let cell_type = |name: &str| {
            let column = columns.iter().find(|column| column.name == name).unwrap();
            assert_eq!(column.cells.len(), 1, "{name}");
            column.cell_type
        };
        for (name, expected) in [
            ("trace", CellType::Text),
            ("limited_by", CellType::Text),
            ("maps", CellType::Unsigned),
            ("violations.total", CellType::Unsigned),
            ("release_delay_p99_ns", CellType::Unsigned),
            ("stale_byte_seconds", CellType::Float),
            ("walk_cache_hit_rate.2", CellType::Float),
        ] {
            assert_eq!(cell_type(name), expected, "{name}");
        }
        // Only a name may be null in a row with every optional field.
        let mut full = Vec::new();
        let row = serde_json::to_value(Row::of_run(true, true)).unwrap();
        flatten(row, String::new(), &mut full);
        let null: Vec<_> = full.iter().filter(|(_, value)| value.is_null()).collect();
        assert!(
            null.iter().all(|(name, _)| name == "limited_by"),
            "{null:?}"
        );
    }
}
