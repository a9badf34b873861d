//! A report as Markdown, for an issue or a merge request.

use super::data::Report;
use super::grid::Grid;
use super::hardware::{HARDWARE, hardware};
use super::line_rate::line_rates;
use super::machine::{DEVICE_SIDE, device_side};
use super::recommend::advice;
use super::release_delays::{DELAYS, release_delays};
use super::round_trips::{ROUND_TRIPS, round_trips};
use super::terminal::{COST, EXPOSURE, cost, headline, omitted, remarks, safety};
use super::ways::{WAYS, ways};
use ringfence_trace::printable;

/// Formats the whole report as Markdown.
pub fn markdown(report: &Report) -> String {
    let mut out = String::new();
    for notes in &report.traces {
        let rows = report.rows_of(&notes.trace);
        out.push_str(&format!("## {}\n\n", headline(notes, &rows)));
        if report.repetitions > 0 {
            let text = advice(&rows, &report.profile);
            out.push_str(&format!("**Recommendation.** {text}\n\n"));
        }
        if let Some(hint) = omitted(report) {
            out.push_str(&format!("{hint}\n\n"));
        }
        if report.repetitions > 0 {
            out.push_str(&format!("### {COST}\n\n"));
            out.push_str(&table(&cost(&rows)));
        }
        out.push_str(&format!("### {EXPOSURE}\n\n"));
        out.push_str(&table(&safety(&rows)));
        if let Some(grid) = release_delays(&rows) {
            out.push_str(&format!("### {DELAYS}\n\n"));
            out.push_str(&table(&grid));
        }
        if let Some(grid) = round_trips(&rows) {
            out.push_str(&format!("### {ROUND_TRIPS}\n\n"));
            out.push_str(&table(&grid));
        }
        if let Some(grid) = ways(&rows) {
            out.push_str(&format!("### {WAYS}\n\n"));
            out.push_str(&table(&grid));
        }
        out.push_str(&format!("### {HARDWARE}\n\n"));
        out.push_str(&table(&hardware(&rows)));
        if let Some(grid) = device_side(report, &rows) {
            out.push_str(&format!("### {DEVICE_SIDE}\n\n"));
            out.push_str(&table(&grid));
        }
        for (title, grid) in line_rates(report, &rows) {
            out.push_str(&format!("### {title}\n\n"));
            out.push_str(&table(&grid));
        }
        for remark in remarks(report, notes, &rows) {
            out.push_str(&format!("- {remark}\n"));
        }
        out.push('\n');
    }
    printable(&out).into_owned()
}

/// Formats a grid as a Markdown table; the group name precedes the names of its columns.
pub(super) fn table(grid: &Grid) -> String {
    let mut out = String::from("|");
    for column in &grid.columns {
        match column.group {
            "" => out.push_str(&format!(" {} |", column.name)),
            group => out.push_str(&format!(" {group}: {} |", column.name)),
        }
    }
    out.push_str("\n|");
    for column in &grid.columns {
        out.push_str(if column.left { ":---|" } else { "---:|" });
    }
    out.push('\n');
    for row in &grid.rows {
        out.push('|');
        for cell in row {
            out.push_str(&format!(" {} |", cell.text.replace('|', "\\|")));
        }
        out.push('\n');
    }
    out.push('\n');
    out
}
