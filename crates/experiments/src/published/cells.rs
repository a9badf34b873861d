//! The papers' tables, bundled as CSV. Cells are looked up by the names in their rows.

use crate::finding::Published;
use ringfence_lab::LabError;

/// A bundled table.
#[derive(Debug, Clone)]
pub struct Sheet {
    file: &'static str,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

macro_rules! sheets {
    ($($file:literal),* $(,)?) => {
        /// All bundled tables: name and text.
        const SHEETS: &[(&str, &str)] = &[
            $(($file, include_str!(concat!("../../data/paper/", $file, ".csv")))),*
        ];
    };
}

sheets![
    "attacks",
    "calgary_results",
    "claims",
    "copy_claims",
    "eiovar_k_threshold_facts",
    "eiovar_table1_sequence",
    "eiovar_table2",
    "eiovar_table3_freebsd",
    "fujita_facts",
    "fujita_table1_configs",
    "guest_count_claims",
    "pool_claims",
    "pviommu_params",
    "pviommu_table1a",
    "pviommu_table1b_ib",
    "pviommu_table5",
    "pviommu_table6_nodes",
    "pviommu_table7_complexity",
    "pviommu_table8_space",
    "riommu_fig7_fig8_anchors",
    "riommu_table1",
    "riommu_table2",
    "riommu_table3",
];

/// Splits a line of CSV into cells. Quotes protect commas; a doubled quote stands for one quote.
fn cells(line: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    let mut quoted = false;
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        let last = out.len() - 1;
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => {
                characters.next();
                out[last].push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => out.push(String::new()),
            _ => out[last].push(character),
        }
    }
    out
}

/// Parses the first number of a printed cell. Skips leading text such as `~`, `>`, `<`, `=`, `+` or
/// words; accepts a leading `-` and a trailing `K` for thousands. Of a range it takes the first
/// number. `None` for words.
fn number(text: &str) -> Option<f64> {
    let rest = text.trim_start_matches(|c: char| !c.is_ascii_digit() && c != '-');
    let end = rest
        .char_indices()
        .find(|&(at, c)| !(c.is_ascii_digit() || c == '.' || (c == '-' && at == 0)))
        .map_or(rest.len(), |(at, _)| at);
    let value: f64 = rest.get(..end)?.parse().ok()?;
    let thousands = rest.get(end..).is_some_and(|rest| rest.starts_with('K'));
    Some(if thousands { value * 1000.0 } else { value })
}

impl Sheet {
    /// Returns the table with this name.
    ///
    /// # Errors
    /// No table has this name: a defect of Ringfence.
    pub fn named(name: &str) -> Result<Self, LabError> {
        let found = SHEETS.iter().find(|(file, _)| *file == name);
        let &(file, text) = found.ok_or(LabError::Internal("no such table"))?;
        let mut lines = text.lines().map(cells);
        Ok(Self {
            file,
            header: lines.next().unwrap_or_default(),
            rows: lines.collect(),
        })
    }

    fn column(&self, name: &str) -> Option<usize> {
        self.header.iter().position(|other| other == name)
    }

    /// Returns the text in `column` of the first row whose cells match all (column, value) pairs of
    /// `wanted`.
    ///
    /// # Errors
    /// No such cell exists: a defect of Ringfence.
    pub fn text(&self, wanted: &[(&str, &str)], column: &str) -> Result<&str, LabError> {
        self.find(wanted, column).map(|(_, text)| text)
    }

    fn find(&self, wanted: &[(&str, &str)], column: &str) -> Result<(usize, &str), LabError> {
        let missing = LabError::Internal("no such cell in a bundled table");
        let holds = |row: &[String]| {
            wanted.iter().all(|(name, value)| {
                let cell = self.column(name).and_then(|column| row.get(column));
                cell.is_some_and(|cell| cell == value)
            })
        };
        let Some(column) = self.column(column) else {
            return Err(missing);
        };
        let mut rows = self.rows.iter().enumerate();
        match rows.find(|(_, row)| holds(row)) {
            Some((index, row)) => {
                let cell = row.get(column).ok_or(missing)?;
                // One for the header, and one because line numbers start at 1.
                Ok((index + 2, cell))
            }
            None => Err(missing),
        }
    }

    /// Returns a printed number and the location of its cell.
    ///
    /// # Errors
    /// No such cell exists, or it holds no number: a defect of Ringfence.
    pub fn printed(&self, wanted: &[(&str, &str)], column: &str) -> Result<Published, LabError> {
        let (line, text) = self.find(wanted, column)?;
        Ok(Published::new(
            text,
            number(text).ok_or(LabError::Internal("a cell without a number"))?,
            format!("{}.csv line {line}, {column}", self.file),
        ))
    }
}

impl Published {
    /// The same cell, interpreted as `value` instead of its first number.
    #[must_use]
    pub fn read_as(mut self, value: f64) -> Self {
        self.value = value;
        self
    }

    /// A value computed from printed numbers; `source` names them.
    pub fn derived(value: f64, source: impl Into<String>) -> Self {
        Self::new(format!("{value:.2}"), value, source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::{BASELINES, Metric, TABLE_1, TABLE_2, TABLE_3, Variant};

    #[test]
    fn numbers_are_read_as_they_are_printed() {
        let cases = [
            ("3986", Some(3986.0)),
            ("~100", Some(100.0)),
            (">6", Some(6.0)),
            ("20-60", Some(20.0)),
            ("+26", Some(26.0)),
            ("-99", Some(-99.0)),
            ("12K", Some(12_000.0)),
            ("\"over 3.3\"", Some(3.3)),
            ("124337.2", Some(124_337.2)),
            ("", None),
            ("words", None),
        ];
        for (text, wanted) in cases {
            assert_eq!(number(text), wanted, "{text}");
        }
    }

    #[test]
    fn quotes_protect_commas() {
        assert_eq!(cells(r#"a,"b,c","d""e",,f"#), ["a", "b,c", "d\"e", "", "f"]);
    }

    #[test]
    fn every_sheet_is_whole() {
        for (name, _) in SHEETS {
            let sheet = Sheet::named(name).unwrap();
            assert!(!sheet.rows.is_empty(), "{name}");
            for row in &sheet.rows {
                assert_eq!(row.len(), sheet.header.len(), "{name}: {row:?}");
            }
        }
        assert!(Sheet::named("nothing").is_err());
    }

    #[test]
    fn tables_equal_the_bundled_csv() {
        let sheet = Sheet::named("riommu_table1").unwrap();
        for column in &TABLE_1 {
            let cell = |function, component| {
                let wanted = [
                    ("function", function),
                    ("component", component),
                    ("mode", column.mode.name()),
                ];
                sheet.printed(&wanted, "value").unwrap().value
            };
            assert_eq!(cell("map", "iova alloc"), column.alloc);
            assert_eq!(cell("unmap", "iotlb inv"), column.invalidation);
        }
        let sheet = Sheet::named("riommu_table2").unwrap();
        for row in &TABLE_2 {
            for variant in Variant::ALL {
                for baseline in BASELINES {
                    let wanted = [
                        ("nic", row.nic.name()),
                        ("benchmark", row.benchmark.name()),
                        ("metric", "throughput"),
                        ("variant", variant.name()),
                        ("divided_by", baseline.name()),
                    ];
                    let cell = sheet.printed(&wanted, "value").unwrap();
                    assert_eq!(cell.value, row.ratio(Metric::Throughput, variant, baseline));
                }
            }
        }
        let sheet = Sheet::named("riommu_table3").unwrap();
        for row in &TABLE_3 {
            let wanted = [("nic", row.nic.name()), ("mode", "none")];
            assert_eq!(
                sheet.printed(&wanted, "value").unwrap().value,
                row.baselines[4]
            );
        }
    }
}
