//! Tasks and their names.

use std::path::PathBuf;

use ringfence_lab::MachineProfile;
use serde::{Deserialize, Serialize};

use crate::digest;

/// Version of the results. It changes with every change of the engine or of the columns that gives
/// another result for the same task, and with it the name of every task.
pub const OUTPUT: u32 = 1;

/// Number of hexadecimal digits of a name: 128 bits.
const DIGITS: usize = 32;

/// One replay of one trace, or of one device of it, in one mode.
///
/// The JSON form is a line of `ringfence sweep --list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Name: the first 32 hexadecimal digits of the SHA-256 digest of the JSON of `content`.
    pub name: String,
    /// Name of the trace in the row. It does not change the name of the task.
    pub trace: String,
    /// Path of the trace; `None` is the sample bundled with the program.
    pub path: Option<PathBuf>,
    /// All that the result depends on.
    pub content: TaskContent,
}

/// All that the result of a task depends on, except the machine that measures cycles.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskContent {
    /// Version of the results; [`OUTPUT`] in a file of this program.
    pub output: u32,
    /// Version of the program.
    pub engine: String,
    /// SHA-256 digest of the bytes of the trace.
    pub digest: String,
    /// The only device to replay; `None` for all.
    pub device: Option<String>,
    /// Name of the mode.
    pub mode: String,
    /// Costs and geometry. `source`, `sources` and `reported` are empty: no result depends on them.
    pub profile: MachineProfile,
    /// Slots of every ring; `None` if the mode has no rings, or counts the slots that the trace
    /// needs.
    pub ring_entries: Option<u32>,
    /// T and C; `None` if the mode has no cache with cycles.
    pub cache_cycles: Option<CacheCycles>,
    /// True if the attack pass runs.
    pub attack: bool,
    /// Number of timed repetitions; 0 measures no cycles.
    pub repetitions: usize,
}

/// T and C of a reverse translation cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheCycles {
    /// T in nanoseconds.
    pub period_ns: u64,
    /// C: the number of whole cycles.
    pub kept: u8,
}

impl Task {
    /// Returns the task of `content` with its name.
    pub fn new(trace: String, path: Option<PathBuf>, content: TaskContent) -> Self {
        Self {
            name: content.name(),
            trace,
            path,
            content,
        }
    }
}

impl TaskContent {
    /// Returns the name of a task with this content.
    pub fn name(&self) -> String {
        // Keys are strings and floats are finite, so the content always serialises.
        let json = serde_json::to_vec(self).unwrap_or_default();
        let mut name = digest::of_bytes(&json);
        name.truncate(DIGITS);
        name
    }
}
