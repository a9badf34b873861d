//! The matrix, the windows and the reasons as text tables.

use ringfence_attack::{Cell as AttackCell, Matrix, Status};
use ringfence_trace::printable;

use super::{LEGEND, symbol, time, word};
use crate::grid::{Cell, CellStyle, Column, Grid, TableStyle};
use crate::markdown::table;

/// Formats the matrix for a terminal.
pub fn attack_terminal(matrix: &Matrix, look: TableStyle) -> String {
    let mut out = grid(matrix).render(look);
    out.push_str(&format!("{LEGEND}\n\n"));
    out.push_str(&classes(matrix).render(look));
    if let Some(windows) = windows(matrix) {
        out.push_str("\nLast success after the release (A02, A03, A05):\n");
        out.push_str(&windows.render(look));
    }
    for (title, lines) in remarks(matrix) {
        out.push_str(&format!("\n{title}:\n"));
        for line in lines {
            out.push_str(&format!("  {line}\n"));
        }
    }
    out.push_str(&format!("\n{}\n", summary(matrix)));
    printable(&out).into_owned()
}

/// Formats the matrix as Markdown.
pub fn attack_markdown(matrix: &Matrix) -> String {
    let mut out = format!("{}\n{LEGEND}\n\n", table(&grid(matrix)).trim_end());
    out = out.replacen(LEGEND, &format!("\n{LEGEND}"), 1);
    out.push_str(&table(&classes(matrix)));
    if let Some(windows) = windows(matrix) {
        out.push_str("### Last success after the release\n\n");
        out.push_str(&table(&windows));
    }
    for (title, lines) in remarks(matrix) {
        out.push_str(&format!("### {title}\n\n"));
        for line in lines {
            out.push_str(&format!("- {line}\n"));
        }
        out.push('\n');
    }
    out.push_str(&format!("{}\n", summary(matrix)));
    printable(&out).into_owned()
}

/// Returns the number of cells with each outcome, in a sentence.
pub(crate) fn summary(matrix: &Matrix) -> String {
    format!(
        "{} cells: {} succeeded, {} stopped, {} not applicable, {} not executed; {} unexpected, \
        {} of them in modes that promise strict safety",
        matrix.cells.len(),
        matrix.count(Status::Succeeded),
        matrix.count(Status::Stopped),
        matrix.count(Status::NotApplicable),
        matrix.count(Status::NotExecuted),
        matrix.unexpected().count(),
        matrix.broken_promises().count(),
    )
}

fn style(cell: &AttackCell) -> CellStyle {
    match cell.status {
        _ if cell.unexpected => CellStyle::Bad,
        Status::Succeeded => CellStyle::Plain,
        Status::Stopped => CellStyle::Good,
        Status::NotApplicable | Status::NotExecuted => CellStyle::Faint,
    }
}

fn grid(matrix: &Matrix) -> Grid {
    let mut columns = vec![Column::left("mode"), Column::left("safety")];
    columns.extend(matrix.classes.iter().map(|(id, _)| Column::left(id)));
    let mut grid = Grid::new(&columns);
    for (mode, safety) in &matrix.modes {
        let mut row = vec![
            Cell::toned(mode.clone(), CellStyle::Strong),
            Cell::new(safety.clone()),
        ];
        let cells = matrix.cells.iter().filter(|cell| cell.mode == *mode);
        row.extend(cells.map(|cell| Cell::toned(symbol(cell), style(cell))));
        grid.rows.push(row);
    }
    grid
}

/// Each class with the number of modes in which it succeeded, and the most bytes that it reached.
fn classes(matrix: &Matrix) -> Grid {
    let mut grid = Grid::new(&[
        Column::left("class"),
        Column::left("attack"),
        Column::right("", "succeeded in"),
        Column::right("", "stopped in"),
        Column::right("", "most successes"),
        Column::right("", "of attempts"),
    ]);
    for (id, name) in &matrix.classes {
        let count = |status| matrix.row(id).filter(|cell| cell.status == status).count();
        let executed = count(Status::Succeeded) + count(Status::Stopped);
        let number = |value: u64| {
            Cell::new(if executed == 0 {
                "-".into()
            } else {
                value.to_string()
            })
        };
        let most = matrix
            .row(id)
            .max_by_key(|cell| (cell.total.successes, cell.total.attempts));
        let most = most.map_or((0, 0), |cell| (cell.total.successes, cell.total.attempts));
        grid.rows.push(vec![
            Cell::toned(*id, CellStyle::Strong),
            Cell::new(*name),
            number(count(Status::Succeeded) as u64),
            number(count(Status::Stopped) as u64),
            number(most.0),
            number(most.1),
        ]);
    }
    grid
}

/// The measured windows by attacker; `None` without a window class.
fn windows(matrix: &Matrix) -> Option<Grid> {
    const ATTACKERS: [&str; 3] = ["passive", "replayer", "racer"];
    let mut grid = Grid::new(&[
        Column::left("mode"),
        Column::left("class"),
        Column::right("", "passive"),
        Column::right("", "replayer"),
        Column::right("", "racer"),
        Column::right("", "busy driver"),
    ]);
    for id in ["A02", "A03", "A05"] {
        for cell in matrix.row(id).filter(|cell| cell.total.successes > 0) {
            let mut row = vec![
                Cell::toned(cell.mode.clone(), CellStyle::Strong),
                Cell::new(id),
            ];
            for attacker in ATTACKERS {
                let last = cell.executed.named(attacker);
                let last = last.and_then(|evidence| evidence.last_success_ns);
                row.push(Cell::new(last.map_or_else(|| "-".into(), time)));
            }
            let unmaps = cell.executed.named("busy driver");
            let unmaps = unmaps.and_then(|evidence| evidence.last_success_unmaps);
            let text = unmaps.map_or_else(|| "-".into(), |unmaps| format!("{unmaps} unmaps"));
            row.push(Cell::new(text));
            grid.rows.push(row);
        }
    }
    (!grid.rows.is_empty()).then_some(grid)
}

/// Lists of remarks with their titles; empty lists are left out.
pub(crate) fn remarks(matrix: &Matrix) -> Vec<(&'static str, Vec<String>)> {
    let mut unexpected = Vec::new();
    for cell in matrix.unexpected() {
        let late = if cell.exceeds_bound {
            ", later than the bound"
        } else {
            ""
        };
        unexpected.push(format!(
            "{} {}: {}{late} ({} of {} attempts, {} stopped uses)",
            cell.class,
            cell.mode,
            word(cell),
            cell.total.successes,
            cell.total.attempts,
            cell.total.false_faults
        ));
    }
    let mut lists = vec![("Unexpected", unexpected)];
    for (title, status) in [
        ("Not applicable", Status::NotApplicable),
        ("Not executed", Status::NotExecuted),
    ] {
        lists.push((
            title,
            grouped(matrix, |cell| {
                (cell.status == status).then_some(cell.reason?)
            }),
        ));
    }
    lists.push((
        "Departures from the attack matrix",
        grouped(matrix, |cell| cell.departure),
    ));
    let notes = matrix
        .cells
        .iter()
        .filter(|cell| !cell.executed.notes.is_empty());
    let measured = notes.map(|cell| {
        format!(
            "{} {}: {}",
            cell.class,
            cell.mode,
            cell.executed.notes.join("; ")
        )
    });
    lists.push(("Measured", measured.collect()));
    lists.retain(|(_, lines)| !lines.is_empty());
    lists
}

/// Returns one line for each class and reason, with the modes unless it applies to all.
fn grouped(matrix: &Matrix, reason: impl Fn(&AttackCell) -> Option<&'static str>) -> Vec<String> {
    let mut groups: Vec<(&str, &str, Vec<&str>)> = Vec::new();
    for cell in &matrix.cells {
        let Some(reason) = reason(cell) else {
            continue;
        };
        match groups
            .iter_mut()
            .find(|(class, other, _)| *class == cell.class && *other == reason)
        {
            Some((_, _, modes)) => modes.push(&cell.mode),
            None => groups.push((cell.class, reason, vec![&cell.mode])),
        }
    }
    let all = matrix.modes.len();
    let lines = groups.into_iter().map(|(class, reason, modes)| {
        if modes.len() == all {
            format!("{class}: {reason}")
        } else {
            format!("{class}: {reason} ({})", modes.join(", "))
        }
    });
    lines.collect()
}
