//! Reports of a comparison: terminal, Markdown and plots for people; JSON and CSV for programs.
//!
//! All of these formats render a [`Report`]. This crate computes no results. It derives
//! recommendations, conditions and differences from rows, and names those rows.
#![forbid(unsafe_code)]

mod agreement;
mod attacks;
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
mod line_rate;
mod machine;
mod markdown;
mod modes;
mod notes;
mod number;
mod plot;
mod recommend;
mod release_delays;
mod round_trips;
mod sizing;
mod terminal;
mod text;
mod ways;

pub use agreement::{agreement_line, trace_agreement};
pub use attacks::{attack_markdown, attack_page, attack_terminal};
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
pub use info::trace_info;
pub use markdown::markdown;
pub use modes::{ModeRow, axes_table, mode_rows, modes_table};
pub use notes::oddities;
pub use plot::{Plot, plots};
pub use recommend::{MIN_MAPS, RECEIVE_LIMIT_NS, TRANSMIT_LIMIT_NS, recommend};
pub use round_trips::ROUND_TRIP_LIMIT;
pub use sizing::{Sizing, sizing_csv, sizing_markdown, sizing_plots, sizing_terminal};
pub use terminal::terminal;
pub use text::printable_json;
