//! Findings as a self-contained HTML page, without scripts, fonts or pictures from elsewhere.

use std::fmt::Write;

use super::Reproduction;
use super::cells::{COLUMNS, Group, cells, groups, score_cells, score_text};
use crate::plot::lines;
use ringfence_experiments::{Finding, Verdict};

/// The style sheet. A narrow screen shows each row of numbers as a card with the names of its
/// columns, so that no table needs horizontal scrolling. Colours follow the reader's light or dark
/// scheme, and repeat information that the text also has.
pub(crate) const STYLE: &str = include_str!("page.css");

pub(crate) fn escape(text: &str) -> String {
    let text = text
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    text.replace('"', "&quot;")
}

/// Returns the CSS class of a verdict.
fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Reproduced => "reproduced",
        Verdict::OrderingOnly => "ordering-only",
        Verdict::NumbersOff => "numbers-off",
        Verdict::Undecided => "undecided",
        Verdict::Differs => "differs",
        Verdict::NotRun => "not-run",
    }
}

/// Formats a verdict as a coloured label.
fn label(verdict: Verdict) -> String {
    format!(
        r#"<span class="verdict {}">{}</span>"#,
        class(verdict),
        verdict.name()
    )
}

/// Formats the page.
pub fn page(reproduction: &Reproduction) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Ringfence: the papers' experiments, run \
         again</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>Ringfence: the papers' experiments, run again</h1>\n"
    );
    introduction(reproduction, &mut out);
    for finding in &reproduction.findings {
        section(finding, &mut out);
    }
    out.push_str("</body>\n</html>\n");
    out
}

fn introduction(reproduction: &Reproduction, out: &mut String) {
    let measured = &reproduction.measured_on;
    let profile = &reproduction.profile;
    let walker = if profile.coherent {
        "snoops the CPU caches"
    } else {
        "does not snoop the CPU caches, except for riommu"
    };
    let _ = write!(
        out,
        "<p>The numbers of the rIOMMU, EIOVAR, Fujita and PVIOMMU papers, next to the numbers \
        measured here.</p>\n\
         <p class=\"faint\">Measured on {} ({}, {} build, cycles by {}). Profile {} models {} \
         cycles for an invalidation, {} for a miss, and the cost of a packet without protection; \
         all other cycles are measured. Its page walker {walker}. {}.</p>\n",
        escape(&measured.cpu),
        escape(measured.arch),
        measured.build,
        measured.cycle_unit,
        escape(&profile.name),
        profile.invalidation_cycles,
        profile.miss_cycles,
        escape(&profile.source),
    );
    verdicts(reproduction, out);
    if !reproduction.not_built.is_empty() {
        let _ = writeln!(
            out,
            "<p>Not in this build: {}.</p>",
            reproduction.not_built.join(", ")
        );
    }
    reading(out);
}

/// Formats the meaning of each verdict that occurs, and the table of verdicts.
fn verdicts(reproduction: &Reproduction, out: &mut String) {
    let percent = 100.0 * reproduction.tolerance;
    out.push_str("<h2 id=\"verdicts\">Verdicts</h2>\n<dl>\n");
    for (verdict, meaning) in [
        (
            Verdict::Reproduced,
            format!(
                "no order is reversed, and every number with a requirement meets it: within \
                {percent:.0}%, or exactly."
            ),
        ),
        (
            Verdict::OrderingOnly,
            "orders are the paper's and none is reversed; numbers differ by more, and the finding \
            explains why."
                .to_owned(),
        ),
        (
            Verdict::Undecided,
            "every number with a requirement meets it, but the paper prints orders and none is \
            decided: all differences lie within a spread."
                .to_owned(),
        ),
        (
            Verdict::NumbersOff,
            "no order is reversed and no exact number differs, but no order is decided either, and \
            numbers differ by more; the finding explains why."
                .to_owned(),
        ),
        (
            Verdict::Differs,
            "an order is reversed or an exact number differs; the finding explains why.".to_owned(),
        ),
        (Verdict::NotRun, "no row was judged.".to_owned()),
    ] {
        let count = reproduction.count(verdict);
        if count > 0 {
            let _ = writeln!(
                out,
                "<dt>{} ({count})</dt><dd>{meaning}</dd>",
                label(verdict)
            );
        }
    }
    out.push_str(
        "</dl>\n<table class=\"words\"><thead><tr><th>experiment</th><th>verdict</th>\
        <th>rows that hold</th><th>not judged</th><th>null model</th><th>here</th>\
        <th>paper</th></tr></thead>\n<tbody>\n",
    );
    for finding in &reproduction.findings {
        let [held, unjudged, null, here] = score_cells(&finding.score);
        let _ = writeln!(
            out,
            "<tr><td><a href=\"#{id}\">{id} {}</a></td><td>{}</td><td>{held}</td>\
            <td>{unjudged}</td><td>{null}</td><td>{here}</td><td class=\"faint\">{}</td></tr>",
            escape(finding.title),
            label(finding.verdict),
            escape(finding.source),
            id = finding.id,
        );
    }
    out.push_str("</tbody></table>\n");
}

/// Formats the explanation of the columns.
fn reading(out: &mut String) {
    out.push_str(
        "<h2 id=\"reading\">How to read the tables</h2>\n\
         <p><b>published</b> is the paper's number, <b>here</b> the median of this run, \
         <b>spread</b> half of the difference between the largest and the smallest repetition, \
         <b>ratio</b> here over published. <b>holds</b> names the requirement and its outcome: \
         equal (exact), within 15% (±15%), with an overhead within 15% (overhead ±15%: what a \
         ratio has beyond 1, or a time beyond that without protection; <b>ratio</b> is then that \
         of the overheads), or on one side (≥, ≤). A row without a requirement has no verdict; \
         <b>fitted</b> marks a number that was fitted or computed from printed numbers. The table \
         of verdicts counts the rows with a published number that are <b>not judged</b>: fitted, \
         not measured, or without a requirement. The parts of a cost are <b>measured</b> on this \
         CPU and <b>modelled</b> by the profile. The <b>null model</b> is protection that costs \
         nothing: the table of verdicts has the number of rows that it would meet, of those for \
         which it has a value, and next to it the number of these rows that hold here.</p>\n",
    );
}

fn section(finding: &Finding, out: &mut String) {
    let _ = write!(
        out,
        "<h2 id=\"{id}\">{id} {}</h2>\n<p>{} {} <span class=\"faint\">{}. {:.1} \
        s.</span></p>\n<p>{}</p>\n",
        escape(finding.title),
        label(finding.verdict),
        score_text(&finding.score),
        escape(finding.source),
        finding.seconds,
        escape(&finding.method),
        id = finding.id,
    );
    for (name, lines) in [("Why", &finding.explanation), ("Note", &finding.notes)] {
        for line in lines {
            let _ = writeln!(out, "<p><b>{name}.</b> {}</p>", escape(line));
        }
    }
    for figure in &finding.figures {
        let _ = write!(
            out,
            "<figure>\n<figcaption>{}</figcaption>\n{}</figure>\n",
            escape(&figure.title),
            lines(figure)
        );
    }
    // Fold tables of more than `MANY` rows.
    const MANY: usize = 60;
    let folded = finding.rows.len() > MANY;
    if folded {
        let _ = writeln!(
            out,
            "<details><summary>All {} numbers</summary>",
            finding.rows.len()
        );
    }
    numbers(finding, out);
    if folded {
        out.push_str("</details>\n");
    }
    sources(finding, out);
}

/// Formats the rows, with a heading for names with a common prefix.
fn numbers(finding: &Finding, out: &mut String) {
    out.push_str("<table class=\"number\"><thead><tr>");
    for name in COLUMNS {
        let _ = write!(out, "<th scope=\"col\">{name}</th>");
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for Group { heading, rows } in groups(&finding.rows) {
        if let Some(heading) = heading {
            let _ = writeln!(
                out,
                "<tr class=\"head\"><th colspan=\"{}\">{}</th></tr>",
                COLUMNS.len(),
                escape(heading)
            );
        }
        for (name, row) in rows {
            let under = if heading.is_some() {
                " class=\"under\""
            } else {
                ""
            };
            let _ = write!(out, "<tr{under}><th scope=\"row\">{}</th>", escape(name));
            for (name, cell) in COLUMNS.iter().zip(cells(row)).skip(1) {
                let class = match (*name, row.holds) {
                    ("holds", Some(false)) => " class=\"no\"",
                    ("holds", Some(true)) => " class=\"yes\"",
                    _ => "",
                };
                let _ = write!(out, "<td data-c=\"{name}\"{class}>{}</td>", escape(&cell));
            }
            out.push_str("</tr>\n");
        }
    }
    out.push_str("</tbody></table>\n");
}

/// Formats the sources of the printed numbers in a folded section.
fn sources(finding: &Finding, out: &mut String) {
    let printed = finding
        .rows
        .iter()
        .filter_map(|row| Some((row, row.published.as_ref()?)));
    let mut printed = printed.peekable();
    if printed.peek().is_none() {
        return;
    }
    out.push_str(
        "<details><summary>Sources of the printed numbers</summary><table \
        class=\"words\"><thead><tr><th>what</th><th>printed</th>\
         <th>source</th></tr></thead>\n<tbody>\n",
    );
    for (row, printed) in printed {
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td class=\"faint\">{}</td></tr>",
            escape(&row.quantity),
            escape(&printed.text),
            escape(&printed.source)
        );
    }
    out.push_str("</tbody></table></details>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MeasuredOn;
    use ringfence_experiments::{Experiment, Setting};
    use ringfence_lab::Profile;

    #[test]
    fn page_is_self_contained_and_well_formed() {
        let measured_on = MeasuredOn {
            cpu: "a <b> & c".into(),
            arch: "test",
            cycle_unit: "tsc",
            build: "debug",
            processors: 2,
        };
        let mut reproduction = Reproduction::new(measured_on, Profile::r210_2015());
        let found = Experiment::find("x10").unwrap().run(&Setting::smoke());
        reproduction.findings.push(found.unwrap());
        let text = page(&reproduction);
        assert!(text.contains("a &lt;b&gt; &amp; c"));
        assert!(text.contains("name=\"viewport\""));
        // The score is in the table of verdicts and below the heading of the finding.
        assert!(
            text.contains("<td>26/26</td><td>-</td><td>-</td><td>-</td>"),
            "{text}"
        );
        assert!(text.contains("26 of 26 judged rows hold. <span"), "{text}");
        for foreign in [
            "<script", "<link", "<img", "src=", "http:", "https:", "url(",
        ] {
            let own = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!own.contains(foreign), "{foreign}");
        }
        for tag in [
            "table",
            "thead",
            "tbody",
            "tr",
            "td",
            "th",
            "p",
            "dl",
            "dt",
            "dd",
            "figure",
            "figcaption",
            "svg",
            "details",
        ] {
            let opened = text.matches(&format!("<{tag}>")).count()
                + text.matches(&format!("<{tag} ")).count();
            assert_eq!(opened, text.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }
}
