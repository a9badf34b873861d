//! Reports of a comparison: terminal, Markdown, a page and plots for people; JSON and CSV for
//! programs.
//!
//! All of these formats render a [`Report`]. This crate computes no results. It derives
//! recommendations, conditions and differences from rows, and names those rows. A
//! [`ComparisonSetup`] fills a report through the `lab` crate, for the command and for Python.
//!
//! A report of the bundled trace, and a condition on its rows as in `compare --fail-if`:
//!
//! ```
//! use ringfence_lab::LabError;
//! use ringfence_lab::modes::Mode;
//! use ringfence_report::{ComparisonOptions, ComparisonSetup, Condition, csv, markdown};
//! use ringfence_trace::Operations;
//!
//! let options = ComparisonOptions {
//!     named: ["fence", "linux-lazy"].iter().filter_map(|name| Mode::find(name)).collect(),
//!     repetitions: Some(0),
//!     ..ComparisonOptions::new(None, None)?
//! };
//! let setup = ComparisonSetup::new(options)?;
//! let mut report = setup.report(None);
//! let open = |options| Operations::sample(options).map_err(LabError::from);
//! setup.add(&mut report, "sample", open, |_| {})?;
//!
//! assert!(markdown(&report).contains("linux-lazy"));
//! assert_eq!(csv(&report.results).lines().count(), 3);
//! let mut failed = Vec::new();
//! for condition in Condition::parse_all("violations>0")? {
//!     failed.extend(condition.matching_rows(&report.results)?);
//! }
//! let failed: Vec<&str> = failed.iter().map(|failed| failed.mode.as_str()).collect();
//! assert_eq!(failed, ["linux-lazy"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod agreement;
mod attacks;
mod comparison;
mod condition;
mod csv;
mod data;
mod diff;
mod entries;
mod family;
mod findings;
mod grid;
mod hardware;
mod info;
mod input_file;
mod judgement;
mod line_rate;
mod machine;
mod markdown;
mod modes;
mod notes;
mod number;
mod page;
mod plot;
mod profile_file;
mod recommend;
mod release_delays;
mod round_trips;
mod sizing;
mod table;
mod terminal;
mod text;
mod ways;

pub use agreement::{agreement_line, trace_agreement};
pub use attacks::{attack_markdown, attack_page, attack_terminal};
pub use comparison::{ComparisonError, ComparisonOptions, ComparisonSetup};
pub use condition::{Condition, ConditionError, FailedCondition};
pub use csv::csv;
pub use data::{MeasuredOn, Report, TraceNotes};
pub use diff::{Change, Diff, DiffError, IncomparableRow, RowDiff};
pub use entries::{EntryOptions, NotApplicable};
pub use findings::{
    Reproduction, experiments_table, finding_markdown, finding_terminal, findings_page,
    findings_terminal,
};
pub use grid::TableStyle;
pub use info::{NamedInfo, trace_info};
pub use input_file::{read_file, read_open_file};
pub use judgement::page_judgement;
pub use markdown::markdown;
pub use modes::{ModeRow, axes_table, mode_rows, modes_table};
pub use notes::oddities;
pub use page::{PageContents, report_page};
pub use plot::{Plot, plots};
pub use profile_file::{ProfileFileError, load_profile};
pub use recommend::{MIN_MAPS, RECEIVE_LIMIT_NS, TRANSMIT_LIMIT_NS, recommend};
pub use round_trips::ROUND_TRIP_LIMIT;
pub use sizing::{
    Sizing, sizing_csv, sizing_markdown, sizing_plots, sizing_table, sizing_terminal,
};
pub use table::{CellType, Column, attack_table, report_table};
pub use terminal::terminal;
pub use text::{json, printable_json};
