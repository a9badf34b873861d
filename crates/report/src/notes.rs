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
            0 => "the trace is empty: nothing was replayed".into(),
            _ => {
                "no event of the trace maps anything (a recording needs dma:* or iommu:* events): \
                nothing was replayed"
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
        notes.lost,
        "event was lost by the kernel: pairs are broken, no safety is claimed; record with larger \
        buffers",
        "events were lost by the kernel: pairs are broken, no safety is claimed; record with \
        larger buffers",
    );
    say(
        notes.malformed,
        "malformed line was skipped (--lenient)",
        "malformed lines were skipped (--lenient)",
    );
    say(
        notes.unmatched_unmaps + notes.unmatched_frees,
        "unmap of something mapped before the trace began was ignored",
        "unmaps of something mapped before the trace began were ignored",
    );
    say(
        notes.live_at_end,
        "mapping was alive at the end and was torn down, unmetered",
        "mappings were alive at the end and were torn down, unmetered",
    );
    say(
        notes.iommu_only_maps,
        "mapping is known from the IOMMU's events alone and counts as bidirectional",
        "mappings are known from the IOMMU's events alone and count as bidirectional",
    );
    say(
        notes.truncated_lists,
        "scatterlist was printed in part; the rest was taken from the IOMMU's events or left out",
        "scatterlists were printed in part; the rest was taken from the IOMMU's events or left out",
    );
    say(
        notes.guessed_lengths,
        "map has segment lengths that are a guess",
        "maps have segment lengths that are a guess",
    );
    say(
        notes.fresh_frames,
        "coherent buffer has no address in the trace and was given one",
        "coherent buffers have no address in the trace and were given one",
    );
    say(
        notes.replaced,
        "map of a live address ended the old mapping first",
        "maps of a live address ended the old mapping first",
    );
    say(
        notes.renamed,
        "mapping lay above 64 GiB and was renamed",
        "mappings lay above 64 GiB and were renamed",
    );
    say(
        notes.setup_maps,
        "map from before the driver was ignored",
        "maps from before the driver were ignored",
    );
    say(
        notes.cut_lines,
        "line at the end of the trace was cut off from the event it belongs to",
        "lines at the end of the trace were cut off from the events they belong to",
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
        notes.unknown,
        "event says nothing about DMA and was skipped",
        "events say nothing about DMA and were skipped",
    );
    if !notes.skips_unmaps.is_empty() {
        let devices = notes.skips_unmaps.join(", ");
        out.insert(
            0,
            format!(
                "the driver of {devices} skips unmaps: the trace does not say when its mappings \
                end, no safety is claimed"
            ),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_happened_is_said_and_the_worst_first() {
        let fine = TraceNotes {
            lines: 9,
            lines_replayed: 2,
            ..TraceNotes::default()
        };
        assert!(oddities(&fine).is_empty());
        assert!(oddities(&TraceNotes::default())[0].contains("empty"));
        let notes = TraceNotes {
            lines_replayed: 2,
            unknown: 12_345,
            lost: 1,
            skips_unmaps: vec!["nvme0".into()],
            ..TraceNotes::default()
        };
        let got = oddities(&notes);
        assert_eq!(got.len(), 3);
        assert!(got[0].contains("nvme0"));
        assert!(got[1].starts_with("1 event was lost"));
        assert!(got[2].starts_with("12,345 events say"));
    }
}
