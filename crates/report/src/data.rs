//! What a report is made of, in its JSON form.

use serde::Serialize;

use ringfence_lab::Profile;
use ringfence_lab::compare::Comparison;
use ringfence_lab::row::{Row, SCHEMA};

/// The processor that executed what was executed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExecutedOn {
    /// Model, as the processor calls itself.
    pub cpu: String,
    /// Instruction set.
    pub arch: &'static str,
    /// What `*_cycles` of executed code are counted in: `tsc`, or `ns` where there is no such
    /// counter.
    pub unit: &'static str,
    /// Of the layer: `release` or `debug`; costs of a debug build say nothing.
    pub build: &'static str,
}

/// What happened to one trace on its way to its rows.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TraceNotes {
    /// Name of the trace, as in its rows.
    pub trace: String,
    /// Names of its devices.
    pub devices: Vec<String>,
    /// Lines read.
    pub lines: u64,
    /// Events that say something about DMA or something else.
    pub events: u64,
    /// Lines that the replay stands for.
    pub lines_replayed: u64,
    /// Bursts of unmaps.
    pub bursts: u64,
    /// Bursts ended because a page still withheld was mapped again.
    pub bursts_cut_by_map: u64,
    /// Events that the kernel lost.
    pub lost: u64,
    /// Events that say nothing about DMA.
    pub unknown: u64,
    /// Lines skipped as malformed (`--lenient`).
    pub malformed: u64,
    /// Maps that the kernel refused.
    pub failed_maps: u64,
    /// Unmaps whose map the trace does not show.
    pub unmatched_unmaps: u64,
    /// Frees of coherent buffers whose allocation the trace does not show.
    pub unmatched_frees: u64,
    /// Mappings known by `iommu:*` lines alone.
    pub iommu_only_maps: u64,
    /// Maps from before the driver: ignored.
    pub setup_maps: u64,
    /// `iommu:*` lines cut off from their `dma:*` line by the end of the trace.
    pub cut_lines: u64,
    /// Scatterlists that the kernel printed in part.
    pub truncated_lists: u64,
    /// Maps whose lengths are a guess.
    pub guessed_lengths: u64,
    /// Coherent buffers whose physical address the trace does not show.
    pub fresh_frames: u64,
    /// Maps of an address that was mapped: the old mapping was ended first.
    pub replaced: u64,
    /// Mappings above 64 GiB, renamed to fit.
    pub renamed: u64,
    /// Mappings alive at the end.
    pub live_at_end: u64,
    /// Devices whose driver skips unmaps.
    pub skips_unmaps: Vec<String>,
}

impl TraceNotes {
    fn new(trace: &str, comparison: &Comparison) -> Self {
        let summary = &comparison.summary;
        Self {
            trace: trace.to_owned(),
            devices: comparison.devices.clone(),
            lines: summary.lines,
            events: summary.events,
            lines_replayed: comparison.lines,
            bursts: comparison.bursts,
            bursts_cut_by_map: comparison.bursts_cut_by_map,
            lost: summary.lost,
            unknown: summary.unknown,
            malformed: summary.malformed,
            failed_maps: summary.failed_maps,
            unmatched_unmaps: summary.unmatched_unmaps,
            unmatched_frees: summary.unmatched_frees,
            iommu_only_maps: summary.iommu_only_maps,
            setup_maps: summary.setup_maps,
            cut_lines: summary.cut_lines,
            truncated_lists: summary.truncated_lists,
            guessed_lengths: summary.guessed_lengths,
            fresh_frames: summary.fresh_frames,
            replaced: summary.replaced,
            renamed: summary.renamed,
            live_at_end: summary.live_at_end,
            skips_unmaps: summary
                .skipping_devices()
                .filter_map(|device| comparison.devices.get(device.index()).cloned())
                .collect(),
        }
    }
}

/// One run of `compare`: what `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of this form.
    pub schema: u32,
    /// Version of the program.
    pub version: &'static str,
    /// What was charged, and the hardware that was modelled.
    pub profile: Profile,
    /// What executed the rest.
    pub executed_on: ExecutedOn,
    /// Timed repetitions; 0: no cycles were measured.
    pub repetitions: usize,
    /// Whether the hostile pass was run.
    pub hostile: bool,
    /// One object a trace.
    pub traces: Vec<TraceNotes>,
    /// One row a trace and mode.
    pub results: Vec<Row>,
}

impl Report {
    /// A report without traces yet.
    pub fn new(
        profile: Profile,
        executed_on: ExecutedOn,
        repetitions: usize,
        hostile: bool,
    ) -> Self {
        Self {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            profile,
            executed_on,
            repetitions,
            hostile,
            traces: Vec::new(),
            results: Vec::new(),
        }
    }

    /// Adds the rows of one trace.
    pub fn push(&mut self, trace: &str, comparison: Comparison) {
        self.traces.push(TraceNotes::new(trace, &comparison));
        self.results.extend(comparison.rows);
    }

    /// The rows of one trace.
    pub fn rows_of(&self, trace: &str) -> Vec<&Row> {
        let rows = self.results.iter();
        rows.filter(|row| row.trace == trace).collect()
    }
}
