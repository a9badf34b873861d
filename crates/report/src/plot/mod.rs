//! Plots as SVG, one for each question: plain files without scripts or foreign fonts, readable on
//! light and dark backgrounds.

mod cost;
mod histogram;
mod lines;
mod safety;
mod scale;
mod search;
mod svg;

use super::data::Report;
pub(super) use cost::inline_cost;
pub(super) use histogram::histogram;
pub(super) use lines::{inline_lines, lines};
pub(super) use safety::inline_safety;
pub(super) use svg::InlineSvg;

/// A plot and its file name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plot {
    /// `TRACE-QUESTION.svg`, with characters that every file system allows.
    pub file: String,
    /// Contents of the file.
    pub svg: String,
}

/// Returns the plots of a report, trace by trace: cost (if measured), safety (if measured), and
/// search lengths.
pub fn plots(report: &Report) -> Vec<Plot> {
    let mut out = Vec::new();
    for notes in &report.traces {
        let rows = report.rows_of(&notes.trace);
        let mut push = |question: &str, svg: String| {
            let file = format!("{}-{question}.svg", file_name(&notes.trace));
            out.push(Plot { file, svg });
        };
        if report.repetitions > 0 {
            push("cost", cost::plot(&notes.trace, &rows, &report.profile));
            push("safety", safety::plot(&notes.trace, &rows));
        }
        push("search", search::plot(&notes.trace, &rows));
    }
    out
}

/// Returns `trace` with only those characters that every file system allows.
pub(super) fn file_name(trace: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '+');
    let name: String = trace
        .chars()
        .map(|c| if safe(c) { c } else { '_' })
        .collect();
    if name.is_empty() {
        "trace".into()
    } else {
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MeasuredOn, TraceNotes};
    use ringfence_lab::MachineProfile;
    use ringfence_lab::row::Row;

    fn report(rows: Vec<Row>) -> Report {
        let measured_on = MeasuredOn {
            cpu: "test".into(),
            arch: "test",
            cycle_unit: "tsc",
            build: "release",
            processors: 2,
        };
        let mut report = Report::new(MachineProfile::r210_2015(), measured_on, 3, true, &[], &[]);
        report.traces.push(TraceNotes {
            trace: "a/<b>".into(),
            ..TraceNotes::default()
        });
        report.results = rows;
        report
    }

    /// Counts tags that are opened and not closed.
    fn open_tags(svg: &str) -> i64 {
        let tags = svg.split('<').skip(1);
        tags.map(|tag| match tag {
            _ if tag.starts_with('/') => -1,
            _ if tag
                .split('>')
                .next()
                .is_some_and(|head| head.ends_with('/')) =>
            {
                0
            }
            _ => 1,
        })
        .sum()
    }

    #[test]
    fn plots_are_whole_whatever_the_rows_hold() {
        let row = |value: f64| Row {
            trace: "a/<b>".into(),
            mode: "a&b".into(),
            safety: "bounded".into(),
            map_cycles: Some(value),
            relative_throughput: Some(value),
            stale_byte_seconds: value,
            search_steps_mean: Some(value),
            search_steps_max: 7,
            ..Row::default()
        };
        let values = [0.0, -5.0, 0.5, 1e12, f64::NAN, f64::INFINITY];
        let all = values.iter().map(|value| row(*value)).collect();
        let unmeasured = vec![Row::of_run(false, false), Row::default()];
        let unmeasured = unmeasured.into_iter().map(|row| Row {
            trace: "a/<b>".into(),
            ..row
        });
        for rows in [Vec::new(), vec![row(0.0)], all, unmeasured.collect()] {
            let plots = plots(&report(rows));
            let files: Vec<&str> = plots.iter().map(|plot| plot.file.as_str()).collect();
            assert_eq!(
                files,
                ["a__b_-cost.svg", "a__b_-safety.svg", "a__b_-search.svg"]
            );
            for plot in &plots {
                assert_eq!(open_tags(&plot.svg), 0, "{}", plot.svg);
                assert!(
                    !plot.svg.contains("NaN") && !plot.svg.contains("inf"),
                    "{}",
                    plot.svg
                );
                assert!(!plot.svg.contains("<b>") && !plot.svg.contains("a&b"));
            }
        }
    }
}
