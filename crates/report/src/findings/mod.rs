//! The findings of `ringfence reproduce`: as JSON, at a terminal, as an HTML page, as Markdown.

mod cells;
mod markdown;
mod page;
mod terminal;

pub use markdown::page as finding_markdown;
pub use page::page as findings_page;
pub(crate) use page::{STYLE, escape};
pub use terminal::{
    experiments as experiments_table, finding as finding_terminal, summary as findings_terminal,
};

use serde::Serialize;

use super::data::MeasuredOn;
use ringfence_experiments::{Experiment, Finding, TOLERANCE, Verdict};
use ringfence_lab::Profile;

/// Version of the JSON form. A version may gain fields, but never removes a field or changes its
/// meaning. In version 3, `spread` has the unit of its row, and `differs` excludes experiments
/// without a reversed order and without a differing exact number. In version 4, `reproduced`
/// excludes experiments that decide none of the paper's orders.
const SCHEMA: u32 = 4;

/// The findings of one call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Reproduction {
    /// Version of this form.
    pub schema: u32,
    /// Version of the program.
    pub version: &'static str,
    /// The CPU of the measured cycles.
    pub measured_on: MeasuredOn,
    /// The profile of the modelled cycles.
    pub profile: Profile,
    /// Tolerance of a number, relative to the published one.
    pub tolerance: f64,
    /// Findings in the order of the request.
    pub findings: Vec<Finding>,
    /// Experiments of the papers that this build does not run.
    pub not_built: Vec<&'static str>,
}

/// IDs of the experiments that a complete build runs.
const WANTED: [&str; 29] = [
    "X01", "X02", "X03", "X04", "X05", "X06", "X07", "X08", "X09", "X10", "X11", "X12", "X13",
    "X14", "X15", "X16", "X17", "X18", "X19", "X20", "X21", "X22", "X23", "X24", "X25", "X26",
    "X27", "X28", "X29",
];

impl Reproduction {
    /// Creates a reproduction without findings.
    pub fn new(measured_on: MeasuredOn, profile: Profile) -> Self {
        Self {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            measured_on,
            profile,
            tolerance: TOLERANCE,
            findings: Vec::new(),
            not_built: WANTED
                .into_iter()
                .filter(|id| Experiment::find(id).is_none())
                .collect(),
        }
    }

    /// Returns the number of findings with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        let same = self
            .findings
            .iter()
            .filter(|finding| finding.verdict == verdict);
        same.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_experiments::{
        Figure, FindingRow, Measured, NullModel, NullScore, Published, Requirement, Score, Series,
    };
    use serde_json::{Value, json, to_value};

    /// Adds the names of all keys in `value` to `out`, except for those of `profile`.
    fn keys(value: &Value, out: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                for (name, value) in map {
                    out.push(name.clone());
                    if name != "profile" && name != "measured_on" {
                        keys(value, out);
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|value| keys(value, out)),
            _ => {}
        }
    }

    fn finding() -> Finding {
        let row = FindingRow::new("latency", "us", Measured::cost(0.25, 13.5, 0.5));
        let none = Published::new("13.4", 13.4, "table");
        let row = row.overhead(
            Published::new("13.9", 13.9, "table"),
            NullModel::printed(&none),
        );
        let rows = vec![row.ordered_within("mlx")];
        let score = Score {
            null_model: Some(NullScore::default()),
            ..Score::of(&rows)
        };
        Finding {
            id: "X04",
            title: "title",
            source: "source",
            method: "method".into(),
            verdict: Verdict::of(&rows),
            score,
            explanation: Vec::new(),
            notes: Vec::new(),
            rows,
            figures: vec![Figure {
                title: "title".into(),
                x: "x",
                y: "y",
                log_x: false,
                series: vec![Series::line("s", Vec::new())],
            }],
            seconds: 1.0,
        }
    }

    #[test]
    fn json_of_a_finding_is_the_documented_one() {
        let measured_on = MeasuredOn {
            cpu: "test".into(),
            arch: "test",
            cycle_unit: "tsc",
            build: "debug",
            processors: 2,
        };
        let mut reproduction = Reproduction::new(measured_on, Profile::r210_2015());
        reproduction.findings.push(finding());
        let value = to_value(&reproduction).unwrap();
        assert_eq!(value["schema"], 4);
        let row = json!({
            "quantity": "latency",
            "unit": "us",
            "published": { "text": "13.9", "value": 13.9, "rounding": 0.05, "source": "table" },
            "measured": {
                "median": 13.75, "spread": 0.125, "measured_part": 0.25, "modelled_part": 13.5,
            },
            "ratio": 0.35 / 0.5,
            "requirement": "overhead",
            "holds": true,
            "null_model": { "value": 13.4, "rounding": 0.05 },
            "group": "mlx",
            "fitted": false,
        });
        let mut found = value["findings"][0]["rows"][0].clone();
        let ratio = found["ratio"].as_f64().unwrap();
        assert!((ratio - 0.7).abs() < 1e-9, "{ratio}");
        found["ratio"] = row["ratio"].clone();
        assert_eq!(found, row);
        let page = include_str!("../../../../docs/JSON.md");
        let (_, page) = page.split_once("### Findings of `reproduce`").unwrap();
        let mut names = Vec::new();
        keys(&value, &mut names);
        for name in names {
            assert!(
                page.contains(&format!("`{name}`")),
                "{name} is not documented"
            );
        }
        for verdict in Verdict::ALL {
            let word = to_value(verdict).unwrap();
            let word = word.as_str().unwrap();
            assert_eq!(word, verdict.name().replace(' ', "-"));
            assert!(
                page.contains(&format!("`{word}`")),
                "{word} is not documented"
            );
        }
        use Requirement::*;
        for requirement in [Exact, Near, Overhead, AtLeast, Above, AtMost, Shown] {
            let word = to_value(requirement).unwrap();
            let word = word.as_str().unwrap();
            assert!(
                page.contains(&format!("`{word}`")),
                "{word} is not documented"
            );
        }
    }
}
