//! The columns of a row: those of the task, then those of `compare --csv`.

use std::sync::LazyLock;

use ringfence_lab::row::{Limit, Row};
use serde_json::Value;

/// The type of a column. Every column may be null.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnType {
    /// `BYTE_ARRAY` with the type `UTF8`.
    Text,
    /// `INT64` with the type `UINT_64`.
    Count,
    /// The physical type `DOUBLE`.
    Float,
    /// The physical type `BOOLEAN`.
    Flag,
}

/// A column of the file of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Name. Dots separate the fields of nested objects.
    pub name: String,
    /// Type of the values.
    pub kind: ColumnType,
}

/// The columns of the task. `trace` and `mode` are among those of the row too, which a failed task
/// does not have.
pub(crate) const TASK: &[(&str, ColumnType)] = {
    use ColumnType::{Count, Flag, Float, Text};
    &[
        ("task", Text),
        ("outcome", Text),
        ("error", Text),
        ("trace", Text),
        ("digest", Text),
        ("device", Text),
        ("mode", Text),
        ("profile", Text),
        ("iotlb_sets", Count),
        ("iotlb_ways", Count),
        ("ring_entries", Count),
        ("rtc_period_ns", Count),
        ("rtc_periods_kept", Count),
        ("attack", Flag),
        ("repetitions", Count),
        ("output", Count),
        ("engine", Text),
        ("machine", Text),
        ("cpu", Text),
        ("arch", Text),
        ("build", Text),
        ("task_seconds", Float),
    ]
};

/// Returns the columns, in the order of the file. The first come from the task, the others from a
/// row whose optional fields are all set, so they do not depend on the result.
pub fn columns() -> &'static [Column] {
    static COLUMNS: LazyLock<Vec<Column>> = LazyLock::new(|| {
        let task = TASK.iter().map(|(name, kind)| Column {
            name: (*name).to_owned(),
            kind: *kind,
        });
        let full = Row {
            limited_by: Some(Limit::Processor),
            ..Row::of_run(true, true)
        };
        let row = row_values(&full).into_iter();
        let row = row.filter(|(name, _)| TASK.iter().all(|(taken, _)| taken != name));
        let row = row.map(|(name, value)| Column {
            kind: kind_of(&value).unwrap_or_else(|| panic!("the column {name} has no type")),
            name,
        });
        task.chain(row).collect()
    });
    &COLUMNS
}

/// Returns the type of the column of a field with this value; `None` for null.
fn kind_of(value: &Value) -> Option<ColumnType> {
    match value {
        Value::String(_) => Some(ColumnType::Text),
        Value::Number(number) if number.is_f64() => Some(ColumnType::Float),
        Value::Number(_) => Some(ColumnType::Count),
        Value::Bool(_) => Some(ColumnType::Flag),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// Returns the scalar fields of a row with their paths.
pub(crate) fn row_values(row: &Row) -> Vec<(String, Value)> {
    let mut values = Vec::new();
    // The keys of all maps in a row are texts, so the conversion cannot fail.
    let row = serde_json::to_value(row).expect("a row has a JSON form");
    leaves(row, String::new(), &mut values);
    values
}

fn leaves(value: Value, path: String, out: &mut Vec<(String, Value)>) {
    let join = |key: &str| match path.as_str() {
        "" => key.to_owned(),
        path => format!("{path}.{key}"),
    };
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                leaves(value, join(&key), out);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.into_iter().enumerate() {
                leaves(value, join(&index.to_string()), out);
            }
        }
        leaf => out.push((path, leaf)),
    }
}
