//! docs/IDS.md: lists every id of the source papers, the files that implement it and the tests that
//! show it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;

use crate::repo::Repo;
use crate::rules;
use crate::source::{Source, Token};
use crate::violation::Violation;

const TABLE: &str = "docs/IDS.md";
const LIST: &str = "xtask/ids.txt";
const PLANNED: &str = "planned";

/// A row of the table.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    line: usize,
    id: String,
    files: Coverage,
    tests: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
enum Coverage {
    Planned,
    Files(Vec<String>),
}

/// Checks the table and returns its progress.
pub(crate) fn check(repo: &Repo) -> anyhow::Result<String> {
    let ids = parse_list(&repo.read(LIST)?);
    let rows = parse_table(&repo.read(TABLE)?);
    let sources = repo.sources()?;
    let by_path: BTreeMap<&str, &Source> = sources
        .iter()
        .filter_map(|source| Some((source.path.to_str()?, source)))
        .collect();
    let exists = |path: &str| repo.root.join(path).exists();
    let has_test = |path: &str, name: &str| by_path.get(path).map(|source| declares(source, name));
    rules::verdict(&violations(&ids, &rows, exists, has_test))?;
    let planned = rows
        .iter()
        .filter(|row| row.files == Coverage::Planned)
        .count();
    Ok(format!(
        "{} of {} ids present, {planned} planned",
        rows.len() - planned,
        rows.len()
    ))
}

/// Runs `check` as a separate task and prints the counts of each family.
pub(crate) fn print(repo: &Repo) -> anyhow::Result<bool> {
    let mut families: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for row in parse_table(&repo.read(TABLE)?) {
        let family = row
            .id
            .trim_end_matches(|c: char| c.is_ascii_digit())
            .to_owned();
        let (there, all) = families.entry(family).or_default();
        *there += usize::from(row.files != Coverage::Planned);
        *all += 1;
    }
    for (family, (there, all)) in families {
        println!("{family:3} {there:3} of {all}");
    }
    let summary = check(repo).context(TABLE)?;
    println!("{summary}");
    Ok(true)
}

fn parse_list(text: &str) -> Vec<String> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect()
}

fn parse_table(text: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some(inner) = line
            .strip_prefix('|')
            .and_then(|rest| rest.strip_suffix('|'))
        else {
            continue;
        };
        let cells: Vec<&str> = inner.split('|').map(str::trim).collect();
        let [id, _what, files, tests] = cells.as_slice() else {
            continue;
        };
        if *id == "id" || id.starts_with("--") {
            continue;
        }
        rows.push(Row {
            line: index + 1,
            id: (*id).to_owned(),
            files: if *files == PLANNED {
                Coverage::Planned
            } else {
                Coverage::Files(quoted(files))
            },
            tests: quoted(tests),
        });
    }
    rows
}

/// Returns the texts between backticks.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// Checks the rows. `has_test(file, function)` returns `None` if the source file does not exist.
fn violations(
    ids: &[String],
    rows: &[Row],
    exists: impl Fn(&str) -> bool,
    has_test: impl Fn(&str, &str) -> Option<bool>,
) -> Vec<Violation> {
    let table = Path::new(TABLE);
    let mut found = Vec::new();
    for id in ids {
        let count = rows.iter().filter(|row| row.id == *id).count();
        if count != 1 {
            found.push(Violation::error(
                table,
                0,
                format!("{id} has {count} rows instead of one"),
            ));
        }
    }
    for row in rows {
        let id = &row.id;
        let mut report = |message: String| found.push(Violation::error(table, row.line, message));
        if !ids.contains(id) {
            report(format!("{id} is not in {LIST}"));
        }
        let Coverage::Files(files) = &row.files else {
            if !row.tests.is_empty() {
                report(format!("{id} is planned and has a test"));
            }
            continue;
        };
        if files.is_empty() {
            report(format!(
                "{id} names no file: `path` in backticks, or {PLANNED}"
            ));
        }
        if row.tests.is_empty() {
            report(format!("{id} names no test: `path::function` in backticks"));
        }
        for file in files.iter().filter(|file| !exists(file)) {
            report(format!("{id}: {file} does not exist"));
        }
        for test in &row.tests {
            match test.rsplit_once("::") {
                None => report(format!("{id}: {test} is not of the form path::function")),
                Some((file, name)) => match has_test(file, name) {
                    None => report(format!("{id}: {file} is not a Rust source file")),
                    Some(false) => report(format!("{id}: {file} has no test function {name}")),
                    Some(true) => {}
                },
            }
        }
    }
    found
}

/// Returns true if `source` has a function `name` among its tests.
fn declares(source: &Source, name: &str) -> bool {
    source
        .tokens
        .windows(2)
        .any(|pair: &[Token]| pair[0].is_ident("fn") && pair[1].is_ident(name) && pair[1].in_test)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(table: &str) -> Vec<String> {
        let ids = ["HW01".to_owned(), "HW02".to_owned()];
        let exists = |path: &str| path == "a.rs";
        let has_test = |file: &str, name: &str| (file == "t.rs").then_some(name == "works");
        violations(&ids, &parse_table(table), exists, has_test)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn a_sound_table_passes() {
        let table = "| id | what | file | test |\n|---|---|---|---|\n\
            | HW01 | x | `a.rs` | `t.rs::works`, `t.rs::works` |\n| HW02 | y | planned | |\n";
        assert_eq!(found(table), [""; 0]);
    }

    #[test]
    fn defects_are_found() {
        let second = "\n| HW02 | y | planned | |";
        for (row, part) in [
            ("", "HW01 has 0 rows"),
            (
                "| HW01 | x | planned | |\n| HW01 | x | planned | |",
                "HW01 has 2 rows",
            ),
            (
                "| HW01 | x | planned | |\n| HW99 | x | planned | |",
                "HW99 is not in",
            ),
            (
                "| HW01 | x | `b.rs` | `t.rs::works` |",
                "b.rs does not exist",
            ),
            (
                "| HW01 | x | `a.rs` | `t.rs::absent` |",
                "no test function absent",
            ),
            (
                "| HW01 | x | `a.rs` | `u.rs::works` |",
                "u.rs is not a Rust source",
            ),
            ("| HW01 | x | `a.rs` | works |", "names no test"),
            ("| HW01 | x | `a.rs` | `works` |", "not of the form"),
            ("| HW01 | x | | `t.rs::works` |", "names no file"),
            (
                "| HW01 | x | planned | `t.rs::works` |",
                "planned and has a test",
            ),
        ] {
            let found = found(&format!("{row}{second}"));
            assert!(
                found.len() == 1 && found[0].contains(part),
                "{row}: {found:?}"
            );
        }
    }

    #[test]
    fn only_tests_count_as_tests() {
        let text = "fn live() {} #[cfg(test)] mod tests { #[test] fn works() {} proptest! { fn \
            holds() {} } }";
        let source = Source::parse(Path::new("a.rs"), text.into()).unwrap();
        assert!(declares(&source, "works") && declares(&source, "holds"));
        assert!(!declares(&source, "live") && !declares(&source, "absent"));
    }
}
