//! Oddities of a trace, as sentences.

use super::data::TraceNotes;
use super::number::count;

/// Returns a sentence for each way in which the replay does not cover the trace, or the trace does
/// not cover the recording; the worst comes first. Empty without oddities.
pub fn oddities(notes: &TraceNotes) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    if notes.lines_replayed == 0 {
        // This comes first, because it invalidates everything else.
        out.push(match notes.lines {
            0 => "the trace is empty, so nothing was replayed".into(),
            _ => {
                "the trace contains no map, so nothing was replayed; record dma:* or iommu:* events"
                    .into()
            }
        });
    }
    let mut say = |number: u64, one: &str, many: &str| {
        if number > 0 {
            let what = if number == 1 { one } else { many };
            out.push(format!("{} {what}", count(number)));
        }
    };
    say(
        notes.lost_events,
        "event was lost by the kernel, so maps and unmaps do not pair and no safety is claimed; \
        record with larger buffers",
        "events were lost by the kernel, so maps and unmaps do not pair and no safety is claimed; \
        record with larger buffers",
    );
    say(
        notes.malformed_lines,
        "malformed line was skipped (--lenient)",
        "malformed lines were skipped (--lenient)",
    );
    say(
        notes.unmatched_unmaps + notes.unmatched_frees,
        "unmap without a map in the trace was ignored",
        "unmaps without a map in the trace were ignored",
    );
    say(
        notes.live_mappings_at_end,
        "mapping was live at the end; its teardown is not metered",
        "mappings were live at the end; their teardown is not metered",
    );
    say(
        notes.iommu_only_maps,
        "mapping appears only in iommu:* events and counts as bidirectional",
        "mappings appear only in iommu:* events and count as bidirectional",
    );
    say(
        notes.truncated_lists,
        "scatterlist was printed in part; the rest comes from iommu:* events or is missing",
        "scatterlists were printed in part; the rest comes from iommu:* events or is missing",
    );
    say(
        notes.guessed_length_maps,
        "map has guessed segment lengths",
        "maps have guessed segment lengths",
    );
    say(
        notes.buffers_without_address,
        "coherent buffer without an address in the trace received one",
        "coherent buffers without an address in the trace received one",
    );
    say(
        notes.replaced_mappings,
        "map of a live address ended the old mapping first",
        "maps of a live address ended the old mapping first",
    );
    say(
        notes.renamed_mappings,
        "mapping lay above 64 GiB and was renamed",
        "mappings lay above 64 GiB and were renamed",
    );
    say(
        notes.setup_maps,
        "map that precedes the driver was ignored",
        "maps that precede the driver were ignored",
    );
    say(
        notes.cut_lines,
        "iommu:* line at the end of the trace has no dma:* line",
        "iommu:* lines at the end of the trace have no dma:* line",
    );
    say(
        notes.failed_maps,
        "map was refused by the kernel",
        "maps were refused by the kernel",
    );
    say(
        notes.bursts_cut_by_map,
        "burst ended early because a withheld page was mapped again",
        "bursts ended early because a withheld page was mapped again",
    );
    say(
        notes.unknown_events,
        "event unrelated to DMA was skipped",
        "events unrelated to DMA were skipped",
    );
    if !notes.devices_skipping_unmaps.is_empty() {
        let devices = notes.devices_skipping_unmaps.join(", ");
        out.insert(
            0,
            format!(
                "the driver of {devices} skips unmaps, so the trace does not show when mappings \
                end; no safety is claimed"
            ),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_list_events_worst_first() {
        let fine = TraceNotes {
            lines: 9,
            lines_replayed: 2,
            ..TraceNotes::default()
        };
        assert!(oddities(&fine).is_empty());
        assert!(oddities(&TraceNotes::default())[0].contains("empty"));
        let notes = TraceNotes {
            lines_replayed: 2,
            unknown_events: 12_345,
            lost_events: 1,
            devices_skipping_unmaps: vec!["nvme0".into()],
            ..TraceNotes::default()
        };
        let got = oddities(&notes);
        assert_eq!(got.len(), 3);
        assert!(got[0].contains("nvme0"));
        assert!(got[1].starts_with("1 event was lost"));
        assert!(got[2].starts_with("12,345 events unrelated"));
    }
}
