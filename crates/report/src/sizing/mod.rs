//! Advice on sizes: as JSON, at a terminal, as Markdown, as CSV, as plots.

mod plots;
mod rows;
mod tables;

pub use plots::sizing_plots;
pub(crate) use plots::{hits, stalls};
pub use rows::{sizing_csv, sizing_table};
pub(crate) use tables::iotlb;
pub use tables::{sizing_markdown, sizing_terminal};

use serde::Serialize;

use ringfence_lab::MachineProfile;
use ringfence_lab::size::TraceSizing;

/// Version of the JSON form. A version may gain fields, but never removes a field or changes its
/// meaning. Version 2 writes null for a share of nothing, version 3 also for a number that the
/// profile does not state.
const SCHEMA: u32 = 3;

/// The advice of one call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sizing {
    /// Version of this form.
    pub schema: u32,
    /// Version of the program.
    pub version: &'static str,
    /// The modelled hardware; the sweeps replace its IOTLB geometry.
    pub profile: MachineProfile,
    /// One object for each trace.
    pub traces: Vec<TraceSizing>,
}

impl Sizing {
    /// Creates a result without advice.
    pub fn new(profile: MachineProfile) -> Self {
        Self {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            profile,
            traces: Vec::new(),
        }
    }
}
