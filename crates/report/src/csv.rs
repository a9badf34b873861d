//! Rows as comma-separated values (RFC 4180). Each number and text of the JSON row has a column,
//! named by its path.

use serde::Serialize;
use serde_json::Value;

use ringfence_lab::row::Row;
use ringfence_trace::printable_line;

/// Formats all rows under one header. The cell of an unmeasured value is empty. Dots name nested
/// fields: `violations.total`, `components.map_table_cycles`,
/// `walk_cache_hit_rate.0`.
pub fn csv(rows: &[Row]) -> String {
    // The header comes from a row with every optional field, so it does not depend on the rows.
    table_of(&Row::of_run(true, true), rows)
}

/// Formats a line for each of `rows` under the field names of `full`.
pub(super) fn table_of(full: &impl Serialize, rows: &[impl Serialize]) -> String {
    let mut header = Vec::new();
    leaves(
        &serde_json::to_value(full).unwrap_or_default(),
        "",
        &mut header,
    );
    let columns: Vec<String> = header.into_iter().map(|(name, _)| name).collect();
    let mut out = columns.join(",");
    out.push_str("\r\n");
    for row in rows {
        let mut cells = Vec::new();
        leaves(
            &serde_json::to_value(row).unwrap_or_default(),
            "",
            &mut cells,
        );
        let line: Vec<String> = columns
            .iter()
            .map(|column| {
                let cell = cells.iter().find(|(name, _)| name == column);
                cell.map(|(_, text)| quoted(text)).unwrap_or_default()
            })
            .collect();
        out.push_str(&line.join(","));
        out.push_str("\r\n");
    }
    out
}

fn leaves(value: &Value, prefix: &str, out: &mut Vec<(String, String)>) {
    let join = |key: &str| match prefix {
        "" => key.to_owned(),
        _ => format!("{prefix}.{key}"),
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(k, v)| leaves(v, &join(k), out)),
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, v)| leaves(v, &join(&index.to_string()), out));
        }
        Value::String(text) => out.push((prefix.to_owned(), text.clone())),
        Value::Null => out.push((prefix.to_owned(), String::new())),
        other => out.push((prefix.to_owned(), other.to_string())),
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
