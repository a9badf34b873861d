//! The report as one page: static HTML that a browser reads from a file.
//!
//! The page needs no network and no script; a small script adds sorting, filters and the choice of
//! colours. Its size is bounded whatever the traces contain (decision 0054).

mod charts;
mod html;
mod matrix;
mod sections;
mod table;
mod verdict;

use ringfence_attack::Matrix;
use ringfence_trace::Info;

use self::html::Html;
use super::data::Report;
use super::sizing::Sizing;
use super::terminal::headline;

/// Most traces on a page.
const MAX_TRACES: usize = 16;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// Forbids every request, and every script but [`SCRIPT`], whose SHA-256 digest it contains.
const POLICY: &str = concat!(
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; ",
    "script-src 'sha256-",
    include_str!("script.sha256"),
    "'"
);

/// The results that a page shows.
#[derive(Debug, Clone, Copy)]
pub struct PageContents<'a> {
    /// The rows of the comparison, with the machine profile they assume.
    pub report: &'a Report,
    /// The statistics of each trace of `report`, in the same order.
    pub infos: &'a [Info],
    /// The sizes for the traces of `report`, in the same order.
    pub sizing: &'a Sizing,
    /// The attack matrix; `None` if the attacks were not executed.
    pub matrix: Option<&'a Matrix>,
}

/// Formats the page. Equal contents give an equal page.
pub fn report_page(contents: &PageContents<'_>) -> String {
    let report = contents.report;
    let mut html = Html::default();
    html.markup("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    html.open(
        "meta",
        &[
            ("http-equiv", "Content-Security-Policy"),
            ("content", POLICY),
        ],
    );
    html.markup("\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    html.markup(
        "<meta name=\"color-scheme\" content=\"light dark\">\n<title>Ringfence report</title>\n",
    );
    html.markup("<style>\n").markup(STYLE);
    html.markup("</style>\n</head>\n<body>\n");
    html.markup(
        "<header><h1>Ringfence report</h1>\
         <button type=\"button\" id=\"theme\" hidden>Dark colours</button></header>\n<main>\n",
    );
    for (index, notes) in report.traces.iter().take(MAX_TRACES).enumerate() {
        let rows = report.rows_of(&notes.trace);
        let id = format!("trace-{index}");
        html.open("section", &[("aria-labelledby", &id)]);
        html.element("h2", &[("id", &id)], &headline(notes, &rows));
        verdict::verdict(&mut html, report, contents.matrix, &rows);
        sections::modes(&mut html, report, index, &rows);
        sections::components(&mut html, report, &rows);
        sections::windows(&mut html, &rows);
        if let Some(info) = contents.infos.get(index) {
            sections::traffic(&mut html, index, info);
        }
        if let Some(sizing) = contents.sizing.traces.get(index) {
            sections::sizes(&mut html, index, sizing);
        }
        sections::method(&mut html, report, notes, &rows);
        html.close("section");
    }
    let left_out = report.traces.len().saturating_sub(MAX_TRACES);
    if left_out > 0 {
        html.element("p", &[], &format!("{left_out} more traces are left out."));
    }
    if let Some(cells) = contents.matrix {
        matrix::matrix(&mut html, cells);
    }
    html.markup("</main>\n<footer>");
    html.element(
        "p",
        &[],
        &format!(
            "Written by ringfence {}. docs/REPORT.md explains the page.",
            report.version
        ),
    );
    html.markup("</footer>\n<script>").markup(SCRIPT);
    html.markup("</script>\n</body>\n</html>\n");
    html.finish()
}

#[cfg(test)]
mod tests;
