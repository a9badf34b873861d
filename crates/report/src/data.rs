//! The contents of a report, in its JSON form.

use serde::Serialize;

use super::entries::EntryOptions;
use super::recommend::recommend;
use ringfence_lab::agreement::Agreement;
use ringfence_lab::compare::Comparison;
use ringfence_lab::modes::Mode;
use ringfence_lab::row::{Row, SCHEMA};
use ringfence_lab::{IommuFamily, LineRate, MachineProfile, ModeThresholds, Operation};

/// The CPU of the timed replays.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MeasuredOn {
    /// Model name, as the CPU reports it.
    pub cpu: String,
    /// Instruction set, as in `std::env::consts::ARCH`.
    pub arch: &'static str,
    /// Unit of measured `*_cycles`: `tsc`, or `ns` on a CPU without such a counter.
    pub cycle_unit: &'static str,
    /// Build of the DMA layer: `release` or `debug`. Costs of a debug build are meaningless.
    pub build: &'static str,
    /// Processors that the program may use. Below two, a sidecore shares the driver's processor.
    pub processors: usize,
}

/// Notes on the conversion of one trace into its rows.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TraceNotes {
    /// Name of the trace, as in its rows.
    pub trace: String,
    /// The recommendation; `None` if the modes were not timed or no mode is recommended, for
    /// example on a trace with fewer maps than [`MIN_MAPS`](crate::MIN_MAPS).
    pub recommendation: Option<String>,
    /// Names of its devices.
    pub devices: Vec<String>,
    /// Lines read, including comments and blank lines.
    pub lines: u64,
    /// Events of all kinds.
    pub events: u64,
    /// Lines that the replay covers.
    pub lines_replayed: u64,
    /// Number of bursts of unmaps.
    pub bursts: u64,
    /// Bursts that ended because the driver mapped a withheld page again.
    pub bursts_cut_by_map: u64,
    /// Events that the kernel lost.
    pub lost_events: u64,
    /// Events that do not concern DMA mappings.
    pub unknown_events: u64,
    /// Malformed lines that the reader skipped (`--lenient`).
    pub malformed_lines: u64,
    /// Maps that the kernel refused.
    pub failed_maps: u64,
    /// Unmaps whose map is not in the trace.
    pub unmatched_unmaps: u64,
    /// Frees of coherent buffers whose allocation is not in the trace.
    pub unmatched_frees: u64,
    /// Mappings that only `iommu:*` lines show.
    pub iommu_only_maps: u64,
    /// `iommu:map` lines that no driver's map explains, such as identity maps; ignored.
    pub setup_maps: u64,
    /// `iommu:*` lines whose `dma:*` line may lie beyond the end of the trace.
    pub cut_lines: u64,
    /// Scatterlists that the kernel printed only in part.
    pub truncated_lists: u64,
    /// Maps whose segment lengths are guessed.
    pub guessed_length_maps: u64,
    /// Coherent buffers whose physical address is not in the trace.
    pub buffers_without_address: u64,
    /// Maps of a live address: the reader first ended the old mapping.
    pub replaced_mappings: u64,
    /// Mappings above 64 GiB that the reader renamed to fit.
    pub renamed_mappings: u64,
    /// Mappings alive at the end.
    pub live_mappings_at_end: u64,
    /// Devices whose driver skips unmaps.
    pub devices_skipping_unmaps: Vec<String>,
    /// Agreement of the recorded addresses with the model of Linux's allocator; `None` if the trace
    /// exceeds a limit of the comparison.
    pub addresses: Option<Agreement>,
}

impl TraceNotes {
    fn new(trace: &str, comparison: &Comparison) -> Self {
        let summary = &comparison.summary;
        Self {
            trace: trace.to_owned(),
            recommendation: None,
            devices: comparison.devices.clone(),
            lines: summary.lines,
            events: summary.events,
            lines_replayed: comparison.lines,
            bursts: comparison.bursts,
            bursts_cut_by_map: comparison.bursts_cut_by_map,
            lost_events: summary.lost,
            unknown_events: summary.unknown,
            malformed_lines: summary.malformed,
            failed_maps: summary.failed_maps,
            unmatched_unmaps: summary.unmatched_unmaps,
            unmatched_frees: summary.unmatched_frees,
            iommu_only_maps: summary.iommu_only_maps,
            setup_maps: summary.setup_maps,
            cut_lines: summary.cut_lines,
            truncated_lists: summary.truncated_lists,
            guessed_length_maps: summary.guessed_lengths,
            buffers_without_address: summary.fresh_frames,
            replaced_mappings: summary.replaced,
            renamed_mappings: summary.renamed,
            live_mappings_at_end: summary.live_at_end,
            devices_skipping_unmaps: summary
                .skipping_devices()
                .filter_map(|device| comparison.devices.get(device.index()).cloned())
                .collect(),
            addresses: comparison.agreement.clone(),
        }
    }
}

/// One run of `compare`: the output of `--json`.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of this form.
    pub schema: u32,
    /// Version of the program.
    pub version: &'static str,
    /// Modelled costs and hardware.
    pub profile: MachineProfile,
    /// The family of IOMMUs that the replays model.
    pub iommu: IommuFamily,
    /// The operation whose cost without protection is c.
    pub operation: Operation,
    /// Number k of parallel page walkers of `parallel_ceiling_gbps`.
    pub walkers: u32,
    /// Page sizes and frames that are not the default.
    #[serde(skip_serializing_if = "EntryOptions::is_default")]
    pub entries: EntryOptions,
    /// One object for each mode that copies small buffers and maps large ones.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub thresholds: Vec<ModeThresholds>,
    /// The CPU of the measured cycles.
    pub measured_on: MeasuredOn,
    /// Timed repetitions; 0 if no cycles were measured.
    pub repetitions: usize,
    /// True if the attack pass ran.
    pub attack: bool,
    /// Names of the replayed modes, in the order of the rows.
    pub modes: Vec<String>,
    /// Names of the modes that the default selection leaves out; empty if the user selected modes.
    pub modes_omitted: Vec<String>,
    /// One object for each trace.
    pub traces: Vec<TraceNotes>,
    /// One row for each trace and mode.
    pub results: Vec<Row>,
    /// One object for each row and each line rate of `gbps`, modelled.
    pub line_rates: Vec<LineRate>,
    /// The line rates to report, in Gb/s.
    #[serde(skip)]
    pub gbps: Vec<f64>,
}

impl Report {
    /// Creates a report without traces, for packets and one page walker. `omitted` names the modes
    /// that the default selection leaves out.
    pub fn new(
        profile: MachineProfile,
        measured_on: MeasuredOn,
        repetitions: usize,
        attack: bool,
        modes: &[Mode],
        omitted: &[Mode],
    ) -> Self {
        let names = |modes: &[Mode]| modes.iter().map(|mode| mode.name.clone()).collect();
        let thresholds = modes.iter();
        let thresholds = thresholds.filter_map(|mode| ModeThresholds::new(mode, &profile));
        Self {
            thresholds: thresholds.collect(),
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            profile,
            iommu: IommuFamily::Vtd,
            operation: Operation::Packet,
            walkers: 1,
            entries: EntryOptions::default(),
            measured_on,
            repetitions,
            attack,
            modes: names(modes),
            modes_omitted: names(omitted),
            traces: Vec::new(),
            results: Vec::new(),
            line_rates: Vec::new(),
            gbps: Vec::new(),
        }
    }

    /// Adds the rows of one trace.
    pub fn push(&mut self, trace: &str, comparison: Comparison) {
        let mut notes = TraceNotes::new(trace, &comparison);
        if self.repetitions > 0 {
            let rows: Vec<&Row> = comparison.rows.iter().collect();
            notes.recommendation = recommend(&rows, &self.profile).ok();
        }
        self.traces.push(notes);
        for gbps in &self.gbps {
            let rates = comparison.rows.iter();
            let rates = rates.map(|row| LineRate::new(row, &self.profile, *gbps));
            self.line_rates.extend(rates);
        }
        self.results.extend(comparison.rows);
    }

    /// Returns the rows of one trace.
    pub fn rows_of(&self, trace: &str) -> Vec<&Row> {
        let rows = self.results.iter();
        rows.filter(|row| row.trace == trace).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MIN_MAPS;
    use ringfence_lab::row::Violations;
    use ringfence_trace::Summary;

    /// The recommendation for a trace with `maps` maps, as JSON.
    fn recommendation(repetitions: usize, maps: u64) -> serde_json::Value {
        let measured_on = MeasuredOn {
            cpu: "test".into(),
            arch: "test",
            cycle_unit: "tsc",
            build: "debug",
            processors: 2,
        };
        let profile = MachineProfile::r210_2015();
        let mut report = Report::new(profile, measured_on, repetitions, true, &[], &[]);
        let row = Row {
            mode: "fence".into(),
            safety: "strict".into(),
            maps,
            unmaps: maps,
            violations: Some(Violations::default()),
            ..Row::of_run(repetitions > 0, true)
        };
        let comparison = Comparison {
            agreement: None,
            rows: vec![row],
            summary: Summary::default(),
            devices: Vec::new(),
            lines: 0,
            bursts: 0,
            bursts_cut_by_map: 0,
        };
        report.push("t", comparison);
        serde_json::to_value(&report).unwrap()["traces"][0]["recommendation"].clone()
    }

    #[test]
    fn json_recommends_nothing_on_few_maps_and_without_timing() {
        let text = recommendation(1, MIN_MAPS);
        assert!(text.as_str().unwrap().starts_with("Use fence: "), "{text}");
        assert!(recommendation(1, MIN_MAPS - 1).is_null());
        assert!(recommendation(0, MIN_MAPS).is_null());
    }
}
