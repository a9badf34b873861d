//! Rows as comma-separated values (RFC 4180). Each number and text of the JSON row has a column,
//! named by its path.

use serde_json::Value;

use super::table::{Column, row_table};
use ringfence_lab::row::Row;
use ringfence_trace::printable_line;

/// Formats all rows under one header. The cell of an unmeasured value is empty. Dots name nested
/// fields: `violations.total`, `components.map_table_cycles`,
/// `walk_cache_hit_rate.0`.
pub fn csv(rows: &[Row]) -> String {
    lines(&row_table(rows))
}

/// Formats the names of `columns` and a line for each row.
pub(super) fn lines(columns: &[Column]) -> String {
    let names = columns.iter().map(|column| column.name.as_str());
    let mut out = names.collect::<Vec<_>>().join(",");
    out.push_str("\r\n");
    let rows = columns.first().map_or(0, |column| column.cells.len());
    for row in 0..rows {
        let cells = columns.iter().map(|column| column.cells.get(row));
        let line: Vec<String> = cells
            .map(|cell| cell.map_or_else(String::new, text))
            .collect();
        out.push_str(&line.join(","));
        out.push_str("\r\n");
    }
    out
}

fn text(cell: &Value) -> String {
    match cell {
        Value::Null => String::new(),
        Value::String(text) => quoted(text),
        other => other.to_string(),
    }
}

fn quoted(text: &str) -> String {
    let text = printable_line(text);
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_every_column() {
        let bounded = Row {
            trace: "a, \"b\"".into(),
            bound: Some("10 ms".into()),
            ..Row::default()
        };
        let text = csv(&[Row::default(), bounded]);
        let mut lines = text.split("\r\n");
        let header = lines.next().unwrap();
        for name in [
            "trace",
            "bound",
            "violations.total",
            "walk_cache_hit_rate.2",
        ] {
            assert!(header.split(',').any(|column| column == name), "{name}");
        }
        let first = lines.next().unwrap();
        assert_eq!(first.split(',').count(), header.split(',').count());
        assert!(lines.next().unwrap().contains("\"a, \"\"b\"\"\""));
    }
}
