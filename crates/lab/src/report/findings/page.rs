//! Findings as one page of HTML that needs nothing else: no script, no font, no picture from elsewhere.

use std::fmt::Write;

use super::Reproduction;
use super::cells::{COLUMNS, cells};
use crate::experiments::{Finding, Verdict};
use crate::report::plot::lines;

/// Narrow screens scroll tables and figures sideways, each in its own box; colours follow the reader's ground.
const STYLE: &str = "\
:root{color-scheme:light dark;--ground:#fff;--ink:#24292f;--faint:#59636e;--rule:#d1d9e0;--band:#f6f8fa}\
@media(prefers-color-scheme:dark){:root{--ground:#0d1117;--ink:#e6edf3;--faint:#9198a1;--rule:#2b323b;--band:#151b23}}\
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,'Segoe UI',sans-serif}\
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;line-height:1.3;margin:2.5rem 0 .25rem}\
p{margin:.5rem 0}.faint{color:var(--faint)}\
.scroll{overflow-x:auto;margin:.75rem 0;border:1px solid var(--rule);border-radius:6px}\
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;width:100%}\
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}\
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:11rem}\
tr:last-child td{border-bottom:0}th{background:var(--band)}\
.verdict{display:inline-block;border-radius:1em;padding:0 .7em;font-size:.85rem;color:#fff;white-space:nowrap}\
.reproduced{background:#1a7f37}.ordering-only{background:#9a6700}.differs{background:#cf222e}.not-run{background:#59636e}\
td.no{color:#cf222e;font-weight:600}@media(prefers-color-scheme:dark){td.no{color:#ff7b72}}\
figure{margin:.75rem 0;overflow-x:auto}figure svg{max-width:100%;min-width:34rem;height:auto;display:block}\
a{color:inherit}details{margin:.5rem 0}summary{cursor:pointer}";

fn escape(text: &str) -> String {
    let text = text
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    text.replace('"', "&quot;")
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Reproduced => "reproduced",
        Verdict::OrderingOnly => "ordering-only",
        Verdict::Differs => "differs",
        Verdict::NotRun => "not-run",
    }
}

fn chip(verdict: Verdict) -> String {
    format!(
        r#"<span class="verdict {}">{}</span>"#,
        class(verdict),
        verdict.name()
    )
}

/// The page.
pub fn page(reproduction: &Reproduction) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Ringfence: three documents, run again</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>Ringfence: three documents, run again</h1>\n"
    );
    introduction(reproduction, &mut out);
    for finding in &reproduction.findings {
        section(finding, &mut out);
    }
    out.push_str("</body>\n</html>\n");
    out
}

fn introduction(reproduction: &Reproduction, out: &mut String) {
    let executed = &reproduction.executed_on;
    let _ = write!(
        out,
        "<p>What the rIOMMU, EIOVAR and Fujita documents print, beside what was measured here. <b>Reproduced</b>: every order is the \
         document's and every number within {:.0}%. <b>Ordering only</b>: numbers are further off. <b>Differs</b>: an order or an exact \
         number is another one.</p>\n\
         <p class=\"faint\">Executed on {} ({}, {} build, cycles by {}). Profile {} charges {} cycles an invalidation, {} a miss, and what a \
         packet costs without protection; all else was executed. {}.</p>\n",
        100.0 * reproduction.tolerance,
        escape(&executed.cpu),
        escape(executed.arch),
        executed.build,
        executed.unit,
        escape(&reproduction.profile.name),
        reproduction.profile.invalidation_cycles,
        reproduction.profile.miss_cycles,
        escape(&reproduction.profile.source),
    );
    out.push_str("<div class=\"scroll\"><table><tr><th>experiment</th><th>verdict</th><th>document</th></tr>\n");
    for finding in &reproduction.findings {
        let _ = writeln!(
            out,
            "<tr><td><a href=\"#{id}\">{id}</a> {}</td><td>{}</td><td>{}</td></tr>",
            escape(finding.title),
            chip(finding.verdict),
            escape(finding.source),
            id = finding.id,
        );
    }
    out.push_str("</table></div>\n");
    if !reproduction.not_built.is_empty() {
        let _ = writeln!(
            out,
            "<p>Not in this build: {}.</p>",
            reproduction.not_built.join(", ")
        );
    }
}

fn section(finding: &Finding, out: &mut String) {
    let _ = write!(
        out,
        "<h2 id=\"{id}\">{id} {} {}</h2>\n<p class=\"faint\">{}. {:.1} s.</p>\n<p>{}</p>\n",
        escape(finding.title),
        chip(finding.verdict),
        escape(finding.source),
        finding.seconds,
        escape(&finding.method),
        id = finding.id,
    );
    out.push_str("<div class=\"scroll\"><table><tr>");
    for name in COLUMNS {
        let _ = write!(out, "<th>{name}</th>");
    }
    out.push_str("</tr>\n");
    for row in &finding.rows {
        out.push_str("<tr>");
        let last = COLUMNS.len() - 1;
        for (place, cell) in cells(row).iter().enumerate() {
            let source = row.printed.as_ref().filter(|_| place == 1);
            match source {
                Some(printed) => {
                    let _ = write!(
                        out,
                        "<td title=\"{}\">{}</td>",
                        escape(&printed.source),
                        escape(cell)
                    );
                }
                None if place == last && row.holds == Some(false) => {
                    let _ = write!(out, "<td class=\"no\">{}</td>", escape(cell));
                }
                None => {
                    let _ = write!(out, "<td>{}</td>", escape(cell));
                }
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table></div>\n");
    for (name, lines) in [("Why", &finding.explanation), ("Note", &finding.notes)] {
        for line in lines {
            let _ = writeln!(out, "<p><b>{name}.</b> {}</p>", escape(line));
        }
    }
    for figure in &finding.figures {
        let _ = write!(out, "<figure>\n{}</figure>\n", lines(figure));
    }
    sources(finding, out);
}

/// A phone has no pointer that could rest on a cell: sources once more, to be unfolded.
fn sources(finding: &Finding, out: &mut String) {
    let printed = finding
        .rows
        .iter()
        .filter_map(|row| Some((row, row.printed.as_ref()?)));
    let mut printed = printed.peekable();
    if printed.peek().is_none() {
        return;
    }
    out.push_str("<details><summary>Where the printed numbers stand</summary><div class=\"scroll\"><table>\n");
    for (row, printed) in printed {
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&row.what),
            escape(&printed.text),
            escape(&printed.source)
        );
    }
    out.push_str("</table></div></details>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profile;
    use crate::experiments::{Experiment, Setting};
    use crate::report::ExecutedOn;

    #[test]
    fn the_page_needs_nothing_else_and_closes_what_it_opens() {
        let executed_on = ExecutedOn {
            cpu: "a <b> & c".into(),
            arch: "test",
            unit: "tsc",
            build: "debug",
        };
        let mut reproduction = Reproduction::new(executed_on, Profile::r210_2015());
        let found = Experiment::find("x10").unwrap().run(&Setting::smoke());
        reproduction.findings.push(found.unwrap());
        let text = page(&reproduction);
        assert!(text.contains("a &lt;b&gt; &amp; c"));
        assert!(text.contains("name=\"viewport\""));
        for foreign in [
            "<script", "<link", "<img", "src=", "http:", "https:", "url(",
        ] {
            let own = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!own.contains(foreign), "{foreign}");
        }
        for tag in [
            "table", "tr", "td", "th", "p", "div", "figure", "svg", "details",
        ] {
            let opened = text.matches(&format!("<{tag}>")).count()
                + text.matches(&format!("<{tag} ")).count();
            assert_eq!(opened, text.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }
}
