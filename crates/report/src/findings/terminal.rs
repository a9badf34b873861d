//! Findings at a terminal.

use unicode_width::UnicodeWidthStr;

use super::Reproduction;
use super::cells::{
    COLUMNS, FIRST_COST_PART, Group, HOLDS, cells, groups, score_cells, score_text,
};
use crate::data::MeasuredOn;
use crate::grid::{Cell, CellStyle, Column, Grid, TableStyle, wrap};
use ringfence_experiments::{Experiment, Finding, FindingRow, Verdict};

/// Returns the style of a verdict.
fn verdict_style(verdict: Verdict) -> CellStyle {
    match verdict {
        Verdict::Reproduced => CellStyle::Good,
        Verdict::OrderingOnly | Verdict::Undecided | Verdict::NumbersOff => CellStyle::Strong,
        Verdict::Differs => CellStyle::Bad,
        Verdict::NotRun => CellStyle::Faint,
    }
}

/// Formats one finding: its verdict, its table, its texts.
pub fn finding(found: &Finding, style: TableStyle) -> String {
    let mut out = format!(
        "{}  {}  [{}]\n",
        found.id,
        found.title,
        found.verdict.name()
    );
    let mut paragraph = |text: &str| {
        out.push_str(&wrap(text, style, 2));
        out.push('\n');
    };
    paragraph(&score_text(&found.score));
    paragraph(&format!("{}. {:.1} s.", found.source, found.seconds));
    paragraph(&found.method);
    out.push_str(&table(&found.rows, style));
    for (name, lines) in [("Why", &found.explanation), ("Note", &found.notes)] {
        for line in lines {
            out.push_str(&wrap(&format!("{name}: {line}"), style, 2));
            out.push('\n');
        }
    }
    out
}

/// Minimum width of the names. Shorter lines would make them unreadable.
const MIN_NAME_WIDTH: usize = 28;

/// Formats the rows, with a heading for names with a common prefix. The parts of costs move to a
/// second table if the terminal is too narrow.
fn table(rows: &[FindingRow], style: TableStyle) -> String {
    let all: Vec<usize> = (1..COLUMNS.len()).collect();
    let widest = |column: usize| {
        let cells = rows
            .iter()
            .filter_map(|row| cells(row).get(column).map(|cell| cell.width()));
        let name = COLUMNS.get(column).map_or(0, |name| name.width());
        cells.max().unwrap_or(0).max(name) + 2
    };
    let room = |columns: &[usize]| {
        let taken: usize = columns.iter().map(|column| widest(*column)).sum();
        style.width.map(|width| width.saturating_sub(taken))
    };
    if room(&all).is_none_or(|room| room >= MIN_NAME_WIDTH) {
        return columns_table(rows, &all, room(&all), style);
    }
    let (first, second) = all.split_at(FIRST_COST_PART - 1);
    let mut out = columns_table(
        rows,
        first,
        room(first).map(|room| room.max(MIN_NAME_WIDTH)),
        style,
    );
    let costs: Vec<FindingRow> = rows
        .iter()
        .filter(|row| {
            row.measured
                .is_some_and(|measured| measured.measured_part.is_some())
        })
        .cloned()
        .collect();
    if !costs.is_empty() {
        out.push('\n');
        out.push_str(&columns_table(
            &costs,
            second,
            room(second).map(|room| room.max(MIN_NAME_WIDTH)),
            style,
        ));
    }
    out
}

/// Formats the columns at `indices`, after names of at most `room` letters per line.
fn columns_table(
    rows: &[FindingRow],
    indices: &[usize],
    room: Option<usize>,
    style: TableStyle,
) -> String {
    let mut columns = vec![Column::left(COLUMNS[0])];
    let names = indices
        .iter()
        .filter_map(|index| COLUMNS.get(*index).copied());
    columns.extend(names.map(|name| Column::right("", name)));
    let mut grid = Grid::new(&columns);
    let narrow = TableStyle {
        width: room,
        colour: false,
    };
    for Group { heading, rows } in groups(rows) {
        let indent = if let Some(heading) = heading {
            for line in wrap(heading, narrow, 0).lines() {
                grid.rows.push(vec![Cell::toned(line, CellStyle::Strong)]);
            }
            "  "
        } else {
            ""
        };
        for (name, row) in rows {
            let name = format!("{indent}{name}");
            let mut lines: Vec<Vec<Cell>> = wrap(&name, narrow, 4)
                .lines()
                .map(|line| vec![Cell::new(line)])
                .collect();
            let texts = cells(row);
            let picked = indices.iter().map(|index| {
                let text = texts.get(*index).cloned().unwrap_or_default();
                Cell::toned(
                    text,
                    if *index == HOLDS {
                        holds_style(row)
                    } else {
                        CellStyle::Plain
                    },
                )
            });
            if let Some(last) = lines.last_mut() {
                last.extend(picked);
            }
            grid.rows.extend(lines);
        }
    }
    grid.render(style)
}

/// Returns the style of the column [`HOLDS`].
fn holds_style(row: &FindingRow) -> CellStyle {
    match row.holds {
        Some(true) => CellStyle::Good,
        Some(false) => CellStyle::Bad,
        None => CellStyle::Plain,
    }
}

/// Formats the verdicts of all findings.
pub fn summary(reproduction: &Reproduction, style: TableStyle) -> String {
    let mut grid = Grid::new(&[
        Column::left("id"),
        Column::left("verdict"),
        Column::right("judged", "hold"),
        Column::right("judged", "not"),
        Column::right("null model", "holds"),
        Column::right("null model", "here"),
        Column::right("", "s"),
        Column::left("experiment, paper"),
    ]);
    for found in &reproduction.findings {
        let mut cells = vec![
            Cell::new(found.id),
            Cell::toned(found.verdict.name(), verdict_style(found.verdict)),
        ];
        cells.extend(score_cells(&found.score).map(Cell::new));
        cells.push(Cell::new(format!("{:.1}", found.seconds)));
        titled(&mut grid, cells, found.title, found.source, style);
    }
    let mut out = grid.render(style);
    let MeasuredOn { cpu, build, .. } = &reproduction.measured_on;
    let line = format!(
        "Measured on {cpu} ({build} build); invalidations, misses and packets modelled by profile \
        {}.",
        reproduction.profile.name
    );
    out.push_str(&wrap(&line, style, 2));
    out.push('\n');
    if !reproduction.not_built.is_empty() {
        let line = format!("Not in this build: {}.", reproduction.not_built.join(", "));
        out.push_str(&wrap(&line, style, 2));
        out.push('\n');
    }
    out
}

/// Adds `title` and `source` after `cells`, in one cell or in several lines if one is too narrow.
fn titled(grid: &mut Grid, mut cells: Vec<Cell>, title: &str, source: &str, style: TableStyle) {
    // Width of the columns for id, verdict, score and seconds.
    const OTHER_COLUMNS_WIDTH: usize = 60;
    let other = if cells.len() > 1 {
        OTHER_COLUMNS_WIDTH
    } else {
        OTHER_COLUMNS_WIDTH / 4
    };
    let room = style.width.map(|width| width.saturating_sub(other));
    let narrow = TableStyle {
        width: room,
        colour: false,
    };
    let text = format!("{title} ({source})");
    let blank = vec![Cell::default(); cells.len()];
    let wrapped = wrap(&text, narrow, 0);
    for (index, line) in wrapped.lines().enumerate() {
        let mut row = if index == 0 {
            std::mem::take(&mut cells)
        } else {
            blank.clone()
        };
        row.push(Cell::new(line));
        grid.rows.push(row);
    }
}

/// Formats the list of experiments.
pub fn experiments(style: TableStyle) -> String {
    let mut grid = Grid::new(&[Column::left("id"), Column::left("experiment, paper")]);
    for experiment in Experiment::ALL {
        let cells = vec![Cell::new(experiment.id)];
        titled(&mut grid, cells, experiment.title, experiment.source, style);
    }
    grid.render(style)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_experiments::{
        Measured, NullScore, Published, Requirement, Score, Setting, Unjudged,
    };
    use ringfence_lab::Profile;

    fn measured_on() -> MeasuredOn {
        MeasuredOn {
            cpu: "test".into(),
            arch: "test",
            cycle_unit: "tsc",
            build: "debug",
            processors: 2,
        }
    }

    const NARROW: TableStyle = TableStyle {
        width: Some(80),
        colour: false,
    };

    /// A finding with rows of long names.
    fn wide_finding() -> Finding {
        let mut found = Experiment::find("X10")
            .unwrap()
            .run(&Setting::smoke())
            .unwrap();
        let printed = Published::new("most accesses", 0.5, "test");
        for (what, value) in [
            (
                "Scattered addresses, rings of [512, 256], bursts up to 16: two entries a ring, \
                invalidated by bursts",
                1234.5,
            ),
            (
                "Scattered addresses, rings of [512, 256], bursts up to 16: best as published",
                0.123,
            ),
        ] {
            let row = FindingRow::new(what, "cycles", Measured::cost(value, 123_456.0, 0.35));
            found.rows.push(
                row.with_published(printed.clone())
                    .require(Requirement::Near),
            );
        }
        found
    }

    #[test]
    fn a_finding_fits_into_eighty_columns() {
        let text = finding(&wide_finding(), NARROW);
        for line in text.lines() {
            assert!(line.width() <= 80, "{} {line}", line.width());
        }
        assert!(
            text.contains("modelled") && text.contains("123,456"),
            "{text}"
        );
        let score = "26 of 26 judged rows hold.";
        assert!(text.contains(score), "{text}");
    }

    #[test]
    fn a_row_stays_one_line_in_a_pipe() {
        let text = finding(&wide_finding(), TableStyle::PLAIN);
        assert!(
            text.contains("two entries a ring, invalidated by bursts  "),
            "{text}"
        );
    }

    #[test]
    fn the_list_of_experiments_fits_into_eighty_columns() {
        for line in experiments(NARROW).lines() {
            assert!(line.width() <= 80, "{line}");
        }
    }

    /// The finding has the widest verdict and score.
    #[test]
    fn a_summary_fits_into_eighty_columns() {
        let mut found = wide_finding();
        found.verdict = Verdict::OrderingOnly;
        found.seconds = 9999.9;
        let null_model = NullScore {
            judged: 200,
            held: 199,
            held_here: 198,
        };
        found.score = Score {
            judged: 200,
            held: 197,
            unjudged: Unjudged {
                shown: 987,
                ..Unjudged::default()
            },
            null_model: Some(null_model),
            ..Score::default()
        };
        let mut reproduction = Reproduction::new(measured_on(), Profile::r210_2015());
        reproduction.findings.push(found);
        let text = summary(&reproduction, NARROW);
        for line in text.lines() {
            assert!(line.width() <= 80, "{} {line}", line.width());
        }
        for part in ["197/200", "987", "199/200", "198/200", "9999.9"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
