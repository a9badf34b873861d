//! X05: hardware pass-through, and software pass-through with a table that maps everything,
//! compared with no IOMMU (rIOMMU section 5.1).

use super::catalogue::{Experiment, Setting};
use super::finding::{FindingRow, Findings, Measured, NullModel};
use super::published::{BASELINE_CYCLES, IOVAS_PER_PACKET, Sheet};
use super::stream::{in_turns, last, runs};
use super::timed::{Cost, TimedSubject};
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X05",
    title: "Pass-through compared with no IOMMU",
    source: "rIOMMU section 5.1",
    measure,
};

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut runs = runs(setting)?;
    runs.truncate(2);
    let mut found = Findings::with_method(
        "mlx stream in the identity modes: measured cycles of map and unmap beyond those of \
        `none`, for two buffers per packet.",
    );
    let claims = Sheet::named("claims")?;
    let names = ["none", "hwpt", "swpt"];
    let subjects = names
        .map(TimedSubject::from_name)
        .into_iter()
        .collect::<Result<_, _>>()?;
    let mut costs = Vec::new();
    for costs_of in in_turns(setting, &runs, subjects)? {
        costs.push(last(&costs_of)?);
    }
    let none = costs.first().map_or(0.0, Cost::measured_per_pair);
    let mut more = Vec::new();
    for (mode, cost) in names.into_iter().zip(&costs).skip(1) {
        let cycles = cost.measured_per_pair();
        let extra = IOVAS_PER_PACKET * (cycles - none);
        // The spread of the whole, not of the small difference.
        let spread = IOVAS_PER_PACKET * cost.spread_per_pair();
        more.push(format!("{mode} {extra:.1} (spread {spread:.1})"));
        let row = FindingRow::new(
            format!("{mode}: cycles per packet beyond none"),
            "cycles",
            Measured::cost(extra, 0.0, 0.0).with_spread(spread),
        );
        let row = row.with_null_model(NullModel::exactly(0.0));
        found.push(row.near(claims.printed(&[("id", "R26")], "value")?));
        let lower = 100.0 * (1.0 - BASELINE_CYCLES / (BASELINE_CYCLES + extra));
        let row = FindingRow::new(
            format!("{mode}: stream throughput below none"),
            "%",
            Measured::counted(lower).with_spread(100.0 * spread / (BASELINE_CYCLES + extra)),
        )
        .with_null_model(NullModel::exactly(0.0));
        found.push(row.near(claims.printed(&[("id", "R25")], "value")?));
    }
    found.explain(format!(
        "Cycles per packet beyond none: {}. hwpt and swpt execute the same code as none here. The \
        kernel's generic DMA code on the way to a pass-through domain, which the paper's 200 \
        cycles measure, is not built, so the rows cannot show them.",
        more.join(", "),
    ));
    found.note(
        "Request-response, for which the paper finds no difference (R27), is not run, and the \
        IOTLB misses of the table of swpt are not charged.",
    );
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_the_cycles_of_the_rows() {
        let found = EXPERIMENT.run(&Setting::smoke()).unwrap();
        for mode in ["hwpt", "swpt"] {
            let name = format!("{mode}: cycles per packet beyond none");
            let row = found.rows.iter().find(|row| row.quantity == name).unwrap();
            let measured = row.measured.unwrap();
            let text = format!(
                "{mode} {:.1} (spread {:.1})",
                measured.median, measured.spread
            );
            assert!(found.explanation[0].contains(&text), "{text}");
        }
    }
}
