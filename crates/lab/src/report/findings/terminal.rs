//! Findings at a terminal.

use super::Reproduction;
use super::cells::{COLUMNS, cells};
use crate::experiments::{Experiment, Finding, Verdict};
use crate::report::data::ExecutedOn;
use crate::report::grid::{Cell, Column, Grid, Look, Tone, wrap};

fn tone(verdict: Verdict) -> Tone {
    match verdict {
        Verdict::Reproduced => Tone::Good,
        Verdict::OrderingOnly => Tone::Strong,
        Verdict::Differs => Tone::Bad,
        Verdict::NotRun => Tone::Faint,
    }
}

/// One finding: its verdict, its table, its words.
pub fn finding(found: &Finding, look: Look) -> String {
    let mut out = format!(
        "{}  {}  [{}]\n",
        found.id,
        found.title,
        found.verdict.name()
    );
    let mut say = |text: &str| {
        out.push_str(&wrap(text, look, 2));
        out.push('\n');
    };
    say(&format!("{}. {:.1} s.", found.source, found.seconds));
    say(&found.method);
    let mut columns = vec![Column::left(COLUMNS[0])];
    columns.extend(COLUMNS.iter().skip(1).map(|name| Column::right("", name)));
    let mut grid = Grid::new(&columns);
    for row in &found.rows {
        let tone = match row.holds {
            Some(true) => Tone::Good,
            Some(false) => Tone::Bad,
            None => Tone::Plain,
        };
        let mut line: Vec<Cell> = cells(row).into_iter().map(Cell::new).collect();
        if let Some(last) = line.last_mut() {
            last.tone = tone;
        }
        grid.rows.push(line);
    }
    out.push_str(&grid.render(look));
    for (name, lines) in [("Why", &found.explanation), ("Note", &found.notes)] {
        for line in lines {
            out.push_str(&wrap(&format!("{name}: {line}"), look, 2));
            out.push('\n');
        }
    }
    out
}

/// The verdicts of all findings, a line each.
pub fn summary(reproduction: &Reproduction, look: Look) -> String {
    let mut grid = Grid::new(&[
        Column::left("id"),
        Column::left("verdict"),
        Column::left("experiment"),
        Column::left("document"),
        Column::right("", "seconds"),
    ]);
    for found in &reproduction.findings {
        grid.rows.push(vec![
            Cell::new(found.id),
            Cell::toned(found.verdict.name(), tone(found.verdict)),
            Cell::new(found.title),
            Cell::new(found.source),
            Cell::new(format!("{:.1}", found.seconds)),
        ]);
    }
    let mut out = grid.render(look);
    let ExecutedOn { cpu, build, .. } = &reproduction.executed_on;
    let line = format!(
        "Executed on {cpu} ({build} build); invalidations, misses and packets charged by profile {}.",
        reproduction.profile.name
    );
    out.push_str(&wrap(&line, look, 2));
    out.push('\n');
    if !reproduction.not_built.is_empty() {
        let line = format!("Not in this build: {}.", reproduction.not_built.join(", "));
        out.push_str(&wrap(&line, look, 2));
        out.push('\n');
    }
    out
}

/// What there is to run.
pub fn experiments(look: Look) -> String {
    let mut grid = Grid::new(&[
        Column::left("id"),
        Column::left("experiment"),
        Column::left("document"),
    ]);
    for experiment in Experiment::ALL {
        let cells = [experiment.id, experiment.title, experiment.source];
        grid.rows.push(cells.into_iter().map(Cell::new).collect());
    }
    grid.render(look)
}
