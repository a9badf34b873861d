//! Reports of a comparison: terminal, Markdown, a page and plots for people; JSON and CSV for
//! programs.
//!
//! All of these formats render a [`Report`]. This crate computes no results. It derives
//! recommendations, conditions and differences from rows, and names those rows. A
//! [`ComparisonSetup`] fills a report through the `lab` crate, for the command and for Python.
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
