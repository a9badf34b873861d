//! The documents' experiments, each as a function that returns what it measured; [`Experiment`] runs one by its id and judges it.

pub mod allocators;
pub mod capture;
mod catalogue;
mod figure;
mod finding;
pub mod model;
pub mod prefetch;
pub mod printed;
mod stream;
pub mod timed;
mod x10_cached_node;
mod x11_search_length;
mod x12_freelists_strict;
mod x13_freelists_deferred;
mod x16_live_set;

pub use catalogue::{Experiment, Setting};
pub use figure::{Figure, Series};
pub use finding::{Demand, Finding, FindingRow, Findings, Measured, Printed, TOLERANCE, Verdict};
