//! The matrix as a self-contained HTML page.

use std::fmt::Write;

use ringfence_attack::{Cell, Matrix, Status};

use super::tables::{remarks, summary};
use super::{LEGEND, symbol, time, word};
use crate::findings::{STYLE, escape};

/// Formats the page. A cell's title gives its counts, and the rows below repeat them as text.
pub fn attack_page(matrix: &Matrix) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Ringfence: attack matrix</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>Ringfence: attack matrix</h1>\n<p>{}.</p>\n<p class=\"faint\">{LEGEND}.</p>\n\
         <table>\n<tr><th>mode</th>",
        escape(&summary(matrix))
    );
    for (id, name) in &matrix.classes {
        let _ = write!(out, "<th title=\"{}\">{id}</th>", escape(name));
    }
    out.push_str("</tr>\n");
    for (mode, safety) in &matrix.modes {
        let _ = write!(
            out,
            "<tr><th title=\"{}\">{}</th>",
            escape(safety),
            escape(mode)
        );
        for cell in matrix.cells.iter().filter(|cell| cell.mode == *mode) {
            let _ = write!(
                out,
                "<td title=\"{}\">{}</td>",
                escape(&sentence(cell)),
                symbol(cell)
            );
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table>\n<h2>Cells</h2>\n<table>\n");
    let executed = |cell: &&Cell| matches!(cell.status, Status::Succeeded | Status::Stopped);
    for cell in matrix.cells.iter().filter(executed) {
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td></tr>",
            cell.class,
            escape(&cell.mode),
            escape(&sentence(cell))
        );
    }
    out.push_str("</table>\n");
    for (title, lines) in remarks(matrix) {
        let _ = writeln!(out, "<h2>{}</h2>\n<ul>", escape(title));
        for line in lines {
            let _ = writeln!(out, "<li>{}</li>", escape(&line));
        }
        out.push_str("</ul>\n");
    }
    out.push_str("</body>\n</html>\n");
    out
}

/// Returns the outcome of a cell with its counts.
fn sentence(cell: &Cell) -> String {
    if let Some(reason) = cell.reason {
        return format!("{}: {reason}", word(cell));
    }
    let total = &cell.total;
    let mut text = format!(
        "{}: {} of {} attempts, {} bytes",
        word(cell),
        total.successes,
        total.attempts,
        total.bytes
    );
    if let Some(last) = total.last_success_ns {
        let _ = write!(text, ", last success {}", time(last));
    }
    text
}
