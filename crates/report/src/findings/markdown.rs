//! A finding as a Markdown page.

use super::cells::{COLUMNS, cells, score_text};
use crate::grid::{Cell, Column, Grid};
use crate::markdown;
use ringfence_experiments::Finding;

/// Formats one finding as a page: source, verdict, method, rows, explanations and notes.
pub fn page(found: &Finding) -> String {
    let mut out = format!(
        "# {}: {}\n\n{}. Verdict: **{}**. {}\n\n{}\n\n",
        found.id,
        found.title,
        found.source,
        found.verdict.name(),
        score_text(&found.score),
        found.method
    );
    let mut columns = vec![Column::left(COLUMNS[0])];
    columns.extend(COLUMNS.iter().skip(1).map(|name| Column::right("", name)));
    let mut grid = Grid::new(&columns);
    grid.rows = found
        .rows
        .iter()
        .map(|row| cells(row).into_iter().map(Cell::new).collect())
        .collect();
    out.push_str(&markdown::table(&grid));
    for (heading, lines) in [("Explanation", &found.explanation), ("Notes", &found.notes)] {
        if lines.is_empty() {
            continue;
        }
        out.push_str(&format!("## {heading}\n\n"));
        for line in lines {
            out.push_str(&format!("- {line}\n"));
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_experiments::{Experiment, Setting};

    #[test]
    fn page_has_rows_and_notes() {
        let experiment = Experiment::find("X10").unwrap();
        let found = experiment.run(&Setting::smoke()).unwrap();
        let page = page(&found);
        assert!(page.starts_with("# X10: The cached node, step by step\n"));
        assert!(
            page.contains("Verdict: **reproduced**. 26 of 26 judged rows hold."),
            "{page}"
        );
        assert!(page.contains("| quantity | published | here |"), "{page}");
        assert_eq!(
            page.lines().filter(|line| line.starts_with("| ")).count(),
            1 + found.rows.len()
        );
        assert!(page.contains(&format!("- {}\n", found.notes[0])));
    }
}
