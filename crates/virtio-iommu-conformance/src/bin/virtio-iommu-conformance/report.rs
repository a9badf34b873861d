//! Tables of statements and devices.

use std::fmt::Write;

use ringfence_virtio_iommu_conformance::{Statement, Verdict};
use serde_json::json;

/// Results of one device.
pub(crate) struct Column {
    pub(crate) name: String,
    /// One verdict per statement.
    pub(crate) verdicts: Vec<Verdict>,
}

impl Column {
    /// Returns true if no required statement fails.
    pub(crate) fn conforms(&self, statements: &[&Statement]) -> bool {
        let mut all = statements.iter().zip(&self.verdicts);
        all.all(|(statement, verdict)| {
            !statement.level.is_required() || !matches!(verdict, Verdict::Fail(_))
        })
    }

    fn count(&self, is_wanted: impl Fn(&Verdict) -> bool) -> usize {
        self.verdicts.iter().filter(|one| is_wanted(one)).count()
    }

    /// Returns the numbers of verdicts.
    fn summary(&self) -> String {
        format!(
            "{}: {} pass, {} fail, {} not applicable",
            self.name,
            self.count(|one| *one == Verdict::Pass),
            self.count(|one| matches!(one, Verdict::Fail(_))),
            self.count(|one| matches!(one, Verdict::NotApplicable(_))),
        )
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Markdown,
    Json,
}

const fn word(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Fail(_) => "fail",
        Verdict::NotApplicable(_) => "n/a",
    }
}

/// Returns the reason of a verdict that is no pass.
fn reason(verdict: &Verdict) -> Option<&str> {
    match verdict {
        Verdict::Pass => None,
        Verdict::Fail(reason) | Verdict::NotApplicable(reason) => Some(reason),
    }
}

/// Returns the statements, one a line.
pub(crate) fn list(statements: &[&Statement]) -> String {
    let mut lines = String::new();
    for Statement {
        id,
        section,
        level,
        text,
        ..
    } in statements
    {
        let _ = writeln!(
            lines,
            "{id:27} {section:14} {:10} {text}",
            level.to_string()
        );
    }
    lines
}

pub(crate) fn render(format: Format, statements: &[&Statement], columns: &[Column]) -> String {
    match format {
        Format::Text => text(statements, columns),
        Format::Markdown => markdown(statements, columns),
        Format::Json => json(statements, columns),
    }
}

fn text(statements: &[&Statement], columns: &[Column]) -> String {
    let mut text = String::new();
    let _ = write!(text, "{:27} {:14} {:10}", "statement", "section", "level");
    for column in columns {
        let _ = write!(text, " {}", column.name);
    }
    let _ = writeln!(text);
    for (number, statement) in statements.iter().enumerate() {
        let level = statement.level.to_string();
        let _ = write!(
            text,
            "{:27} {:14} {level:10}",
            statement.id, statement.section
        );
        for column in columns {
            let width = column.name.len();
            let _ = write!(text, " {:width$}", word(&column.verdicts[number]));
        }
        text.truncate(text.trim_end().len());
        let _ = writeln!(text);
    }
    for column in columns {
        let _ = writeln!(text, "\n{}", column.summary());
        for (statement, verdict) in statements.iter().zip(&column.verdicts) {
            if let Some(reason) = reason(verdict) {
                let _ = writeln!(text, "{} {}: {reason}", word(verdict), statement.id);
            }
        }
    }
    text
}

fn markdown(statements: &[&Statement], columns: &[Column]) -> String {
    let mut text = String::new();
    for column in columns {
        let _ = writeln!(text, "- {}", column.summary());
    }
    let _ = write!(text, "\n| id | statement | section | level |");
    for column in columns {
        let _ = write!(text, " {} |", column.name);
    }
    let _ = writeln!(text, "\n|---|---|---|---|{}", "---|".repeat(columns.len()));
    for (number, statement) in statements.iter().enumerate() {
        let _ = write!(
            text,
            "| {} | {} | {} | {} |",
            statement.id, statement.text, statement.section, statement.level
        );
        for column in columns {
            let _ = write!(text, " {} |", word(&column.verdicts[number]));
        }
        let _ = writeln!(text);
    }
    for column in columns {
        if column.verdicts.iter().all(|one| *one == Verdict::Pass) {
            continue;
        }
        let _ = writeln!(
            text,
            "\n## {}\n\n| id | verdict | requirement and observation |\n|---|---|---|",
            column.name
        );
        for (statement, verdict) in statements.iter().zip(&column.verdicts) {
            if let Some(reason) = reason(verdict) {
                let reason = reason.replace('|', "\\|");
                let _ = writeln!(text, "| {} | {} | {reason} |", statement.id, word(verdict));
            }
        }
    }
    text
}

fn json(statements: &[&Statement], columns: &[Column]) -> String {
    let devices: Vec<_> = columns
        .iter()
        .map(|column| {
            let results = statements.iter().zip(&column.verdicts);
            let results = results.map(|(statement, verdict)| {
                json!({
                    "id": statement.id,
                    "verdict": word(verdict),
                    "reason": reason(verdict),
                })
            });
            json!({
                "name": column.name,
                "conforms": column.conforms(statements),
                "results": results.collect::<Vec<_>>(),
            })
        })
        .collect();
    let statements: Vec<_> = statements
        .iter()
        .map(|statement| {
            json!({
                "id": statement.id,
                "section": statement.section,
                "level": statement.level.to_string(),
                "text": statement.text,
            })
        })
        .collect();
    let report = json!({ "specification": "virtio 1.3", "statements": statements,
        "devices": devices });
    format!("{report:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_virtio_iommu_conformance::{Level, STATEMENTS};

    /// Returns the column of a device that fails the statements of one level.
    fn fails(level: Level) -> (Vec<&'static Statement>, Column) {
        let statements: Vec<&Statement> = STATEMENTS.iter().collect();
        let verdicts = STATEMENTS.iter().map(|one| match one.level == level {
            true => Verdict::Fail("read | write".into()),
            false => Verdict::NotApplicable("no device".into()),
        });
        let column = Column {
            name: "A device".into(),
            verdicts: verdicts.collect(),
        };
        (statements, column)
    }

    #[test]
    fn a_device_conforms_despite_a_may_or_robustness() {
        for (level, conforms) in [
            (Level::Must, false),
            (Level::Should, false),
            (Level::Text, false),
            (Level::May, true),
            (Level::Robustness, true),
        ] {
            let (statements, column) = fails(level);
            assert_eq!(column.conforms(&statements), conforms, "{level}");
        }
    }

    #[test]
    fn bars_of_a_reason_do_not_end_its_cell() {
        let (statements, column) = fails(Level::May);
        let table = markdown(&statements, &[column]);
        assert!(table.contains("| fail | read \\| write |"), "{table}");
    }
}
