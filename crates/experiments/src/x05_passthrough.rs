//! X05: hardware pass-through, and software pass-through with a table that maps everything,
//! compared with no IOMMU (rIOMMU section 5.1).

use super::catalogue::{Experiment, Setting};
use super::finding::{FindingRow, Findings, Measured};
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
    for (mode, cost) in names.into_iter().zip(&costs).skip(1) {
        let (cycles, spread) = (cost.measured_per_pair(), cost.spread);
        let extra = IOVAS_PER_PACKET * (cycles - none);
        let row = FindingRow::new(
            format!("{mode}: cycles per packet beyond none"),
            "cycles",
            Measured::cost(extra, 0.0, spread),
        );
        found.push(row.near(claims.printed(&[("id", "R26")], "value")?));
        let lower = 100.0 * (1.0 - BASELINE_CYCLES / (BASELINE_CYCLES + extra));
        let row = FindingRow::new(
            format!("{mode}: stream throughput below none"),
            "%",
            Measured::timed(lower, spread),
        );
        found.push(row.near(claims.printed(&[("id", "R25")], "value")?));
    }
    found.explain(
        "The paper's 200 cycles are those of the kernel's generic DMA code before it reaches a \
        pass-through domain. Here all identity modes execute the same code and differ only in the \
        hardware's lookup, so their CPU cycles are equal.",
    );
    found.note(
        "Request-response, for which the paper finds no difference, follows: the added latency is \
        the added cycles, which are not measurable.",
    );
    Ok(found)
}
