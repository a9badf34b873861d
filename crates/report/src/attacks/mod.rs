//! Attack matrices: terminal, Markdown and an HTML page.

mod page;
mod tables;

pub use page::attack_page;
pub use tables::{attack_markdown, attack_terminal};
pub(crate) use tables::{remarks, summary};

use ringfence_attack::{Cell, Status};

/// Returns the symbol of a cell in the matrix.
fn symbol(cell: &Cell) -> &'static str {
    match (cell.status, cell.unexpected) {
        (Status::Succeeded, false) => "x",
        (Status::Succeeded, true) => "X!",
        (Status::Stopped, false) => ".",
        (Status::Stopped, true) => ".!",
        (Status::NotApplicable, false) => "-",
        (Status::NotApplicable, true) => "-!",
        (Status::NotExecuted, _) => "?",
    }
}

/// Returns the outcome of a cell in words.
pub(crate) fn word(cell: &Cell) -> &'static str {
    match cell.status {
        Status::Succeeded => "succeeded",
        Status::Stopped => "stopped",
        Status::NotApplicable => "not applicable",
        Status::NotExecuted => "not executed",
    }
}

/// Formats a time with three significant digits.
fn time(ns: u64) -> String {
    let value = ns as f64;
    match ns {
        0 => "at once".to_owned(),
        1..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{} us", value / 1e3),
        1_000_000..1_000_000_000 => format!("{} ms", value / 1e6),
        _ => format!("{} s", value / 1e9),
    }
}

const LEGEND: &str = "x succeeded, . stopped, - not applicable, ? not executed, ! unexpected";
