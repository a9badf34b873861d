//! X27: shadow buffers beside strict modes and no protection (Markuze et al., ASPLOS 2016): at MTU
//! frames, and at 64 KiB segments.

use ringfence_lab::LabError;
use ringfence_lab::Profile;

use super::claim_loads::{METHOD, PAGES_OF, against, costs, loads, over, relative};
use super::finding::{FindingRow, Findings, Measured, NullModel, Published, Requirement};
use super::published::Sheet;

/// The strict modes without copies, and all modes.
const STRICT: [&str; 3] = ["strict+", "linux-strict", "fence"];
const MODES: [&str; 4] = [STRICT[0], STRICT[1], STRICT[2], COPY];
const COPY: &str = "copy";

/// Runs the workloads with `packets` packets on each interface, and the copies on this CPU.
pub(super) fn measure(
    profile: &Profile,
    packets: u64,
    repetitions: usize,
) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(METHOD);
    let sheet = Sheet::named("copy_claims")?;
    let claim = |claim: &str| sheet.printed(&[("claim", claim)], "value");
    let most = claim("copy over the best strict mode at most")?;
    let least = claim("copy over none at least")?;
    let text = sheet.text(&[("claim", "copy over zero copy")], "value")?;
    let faster = Published::new(text, 1.0, "copy_claims.csv copy over zero copy");
    let mut largest = Measured::counted(f64::NEG_INFINITY);
    let mut words = Vec::new();
    for load in loads(packets)? {
        let costs = costs(&MODES, profile, repetitions, &load)?;
        for cost in &costs {
            found.push(cost.row(&load));
        }
        let (copy, best) = against(&costs, COPY, &STRICT)?;
        for &(of, c) in &load.baselines {
            let name = format!("{}{of}", load.name);
            let share = relative(c, copy);
            let over = over(c, copy, best);
            if over.median > largest.median {
                largest = over;
            }
            words.push(format!(
                "{name}: {:.2} of none, {:.2} times {}",
                share.median, over.median, best.mode
            ));
            let row = FindingRow::new(format!("{name}: copy over none"), "", share);
            found.push(
                row.with_null_model(NullModel::RATIO)
                    .at_least(least.clone()),
            );
            let row = FindingRow::new(format!("{name}: copy over the best strict mode"), "", over);
            let row = row
                .with_null_model(NullModel::RATIO)
                .with_published(faster.clone());
            found.push(row.require(Requirement::Above));
        }
    }
    let row = FindingRow::new("largest: copy over the best strict mode", "", largest);
    found.push(row.with_null_model(NullModel::RATIO).near(most));
    found.explain(format!("Measured: {}.", words.join("; ")));
    found.explain(
        "The paper's 5 is with all cores at 40 Gb/s, where processors contend for the invalidation \
        queue. This model has one processor and no contention, so its strict modes are better than \
        the paper's.",
    );
    found.explain(
        "A copy of 64 KiB takes longer than an invalidation. The paper maps such buffers without \
        a copy and copies only their ends; mode copy does not.",
    );
    for claim in EXPECTED {
        let expected = sheet.text(&[("claim", claim)], "value")?;
        let why = sheet.text(&[("claim", claim)], "source")?;
        found.note(format!(
            "{claim}, before the run: {expected}. Source: {why}."
        ));
    }
    found.note(format!(
        "c is the paper's 1816 cycles of a packet (rIOMMU Fig. 7). A segment has no published \
        cost on that machine. Its rows take the cost of one packet, a lower bound, and that of 16 \
        pages on another machine ({PAGES_OF}), which includes the application's own copy."
    ));
    Ok(found)
}

/// Expectations of the bundled table.
const EXPECTED: [&str; 5] = [
    "expected: mlx stream",
    "expected: brcm stream",
    "expected: 64 KiB with the cost of a packet",
    "expected: 64 KiB with the cost of 16 pages",
    "expected: largest ratio to strict",
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Modelled cycles are one invalidation for an unmap in strict modes, and none for copies. The
    /// smoke setting says nothing about time.
    #[test]
    fn rows_are_whole_and_copies_invalidate_nothing() {
        const PACKETS: u64 = 512;
        let found = measure(&Profile::r210_2015(), PACKETS, 1).unwrap();
        // Four modes of four workloads, two rows for each of six baselines, and the largest.
        assert_eq!(found.rows.len(), 4 * 4 + 2 * 6 + 1);
        for load in loads(PACKETS).unwrap() {
            for mode in MODES {
                let what = format!("{}: {mode}, additional cycles", load.name);
                let row = found.rows.iter().find(|row| row.quantity == what).unwrap();
                let measured = row.measured.unwrap();
                let unmaps = load.runs[1].plan.unmaps as f64 / load.units;
                let wanted = if mode == COPY { 0.0 } else { 2150.0 * unmaps };
                let modelled = measured.modelled_part.unwrap();
                assert!(
                    (modelled - wanted).abs() < 1e-6,
                    "{what}: {modelled} not {wanted}"
                );
                assert!(measured.measured_part.unwrap() > 0.0, "{what}");
            }
        }
        let judged = found.rows.iter().filter(|row| row.holds.is_some());
        assert_eq!(judged.count(), 2 * 6 + 1);
        let notes = found.notes.join(" ");
        for claim in EXPECTED {
            assert!(notes.contains(claim), "{claim}");
        }
    }
}
