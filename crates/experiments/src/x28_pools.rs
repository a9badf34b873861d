//! X28: buffers from a pool that stays mapped, beside copies, strict modes and no protection
//! (Markuze et al., DAMN, ASPLOS 2018): at MTU frames, and at 64 KiB segments.

use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::layer::INSPECTED_BYTES;

use super::claim_loads::{METHOD, PAGES_OF, against, costs, loads, over, relative};
use super::finding::{FindingRow, Findings, NullModel, Published, Requirement};
use super::published::Sheet;

/// The strict modes without copies.
const STRICT: [&str; 3] = ["strict+", "linux-strict", "fence"];
const MODES: [&str; 5] = [STRICT[0], STRICT[1], STRICT[2], COPY, POOL];
const COPY: &str = "copy";
const POOL: &str = "pool";

/// Runs the workloads with `packets` packets on each interface.
pub(super) fn measure(
    profile: &Profile,
    packets: u64,
    repetitions: usize,
) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(METHOD);
    let sheet = Sheet::named("pool_claims")?;
    // The abstract has words and no numbers: a share of none near 1, and ratios above 1.
    let claim = |claim: &str| -> Result<Published, LabError> {
        let text = sheet.text(&[("claim", claim)], "value")?;
        Ok(Published::new(
            text,
            1.0,
            format!("pool_claims.csv {claim}"),
        ))
    };
    let comparable = claim("pool over none")?;
    let hampers = claim("pool over copy")?;
    let slower = claim("pool over the best strict mode")?;
    let mut words = Vec::new();
    for load in loads(packets)? {
        let costs = costs(&MODES, profile, repetitions, &load)?;
        for cost in &costs {
            found.push(cost.row(&load));
        }
        let (pool, copy) = against(&costs, POOL, &[COPY])?;
        let (_, best) = against(&costs, POOL, &STRICT)?;
        for &(of, c) in &load.baselines {
            let name = format!("{}{of}", load.name);
            let share = relative(c, pool);
            let [over_copy, over_strict] = [copy, best].map(|other| over(c, pool, other));
            words.push(format!(
                "{name}: {:.2} of none, {:.2} times copy, {:.2} times {}",
                share.median, over_copy.median, over_strict.median, best.mode
            ));
            let row = FindingRow::new(format!("{name}: pool over none"), "", share);
            found.push(
                row.with_null_model(NullModel::RATIO)
                    .near(comparable.clone()),
            );
            for (other, measured, printed) in [
                ("copy", over_copy, &hampers),
                ("the best strict mode", over_strict, &slower),
            ] {
                let row = FindingRow::new(format!("{name}: pool over {other}"), "", measured);
                let row = row.with_null_model(NullModel::RATIO);
                let row = row.with_published(printed.clone());
                found.push(row.require(Requirement::Above));
            }
        }
    }
    found.explain(format!("Measured: {}.", words.join("; ")));
    found.explain(format!(
        "Assumed: the driver takes every buffer from the pool, and copies the first \
        {INSPECTED_BYTES} bytes of each that the device wrote. The payload is not copied here. The \
        paper copies it once, to user space, as every kernel does without protection."
    ));
    found.explain(
        "The allocation and the free of a buffer count as cost of pool, although a driver \
        allocates its buffers in every mode. The share of none is therefore a lower bound.",
    );
    found.explain(
        "The promises differ. A device of mode pool may change a released buffer until the driver \
        has copied the bytes (class own-pool); copy is byte-granular.",
    );
    for claim in EXPECTED {
        let expected = sheet.text(&[("claim", claim)], "value")?;
        let why = sheet.text(&[("claim", claim)], "source")?;
        found.note(format!(
            "{claim}, before the run: {expected}. Source: {why}."
        ));
    }
    found.note(format!(
        "c is 1816 cycles of a packet (rIOMMU Fig. 7), for a segment also the cost of 16 pages on \
        another machine ({PAGES_OF}). The paper's machine has 100 Gb/s, and its abstract prints no \
        number."
    ));
    Ok(found)
}

/// Expectations of the bundled table.
const EXPECTED: [&str; 5] = [
    "expected: mlx stream",
    "expected: brcm stream",
    "expected: 64 KiB with the cost of a packet",
    "expected: 64 KiB with the cost of 16 pages",
    "expected: verdict",
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The smoke setting says nothing about time.
    #[test]
    fn rows_are_whole_and_pools_invalidate_nothing() {
        const PACKETS: u64 = 512;
        let found = measure(&Profile::r210_2015(), PACKETS, 1).unwrap();
        // Five modes of four workloads, and three rows for each of six baselines.
        assert_eq!(found.rows.len(), 5 * 4 + 3 * 6);
        for load in loads(PACKETS).unwrap() {
            for mode in MODES {
                let what = format!("{}: {mode}, additional cycles", load.name);
                let row = found.rows.iter().find(|row| row.quantity == what).unwrap();
                let measured = row.measured.unwrap();
                let unmaps = load.runs[1].plan.unmaps as f64 / load.units;
                let wanted = match mode {
                    COPY | POOL => 0.0,
                    _ => 2150.0 * unmaps,
                };
                let modelled = measured.modelled_part.unwrap();
                assert!(
                    (modelled - wanted).abs() < 1e-6,
                    "{what}: {modelled} not {wanted}"
                );
                assert!(measured.measured_part.unwrap() > 0.0, "{what}");
            }
        }
        let judged = found.rows.iter().filter(|row| row.holds.is_some());
        assert_eq!(judged.count(), 3 * 6);
        let notes = found.notes.join(" ");
        for claim in EXPECTED {
            assert!(notes.contains(claim), "{claim}");
        }
    }
}
