//! X05: pass-through by hardware and by a table that maps everything, against no IOMMU (rIOMMU section 5.1).

use super::catalogue::{Experiment, Setting};
use super::finding::{Demand, FindingRow, Findings, Measured};
use super::printed::{C_NONE, IOVAS_PER_PACKET, Sheet};
use super::stream::{last, runs};
use super::timed::{Subject, Timed};
use crate::error::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X05",
    title: "Pass-through against no IOMMU",
    source: "rIOMMU section 5.1",
    measure,
};

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut runs = runs(setting)?;
    runs.truncate(2);
    let mut found = Findings::by(
        "mlx stream through the identity modes: what their map and unmap execute beyond that of `none`, for two buffers a packet.",
    );
    let claims = Sheet::named("claims")?;
    let pair = |mode: &str| -> Result<(f64, f64), LabError> {
        let mut timed = Timed::new(Subject::named(mode)?, &setting.profile, setting.repetitions)?;
        let costs = runs
            .iter()
            .map(|run| timed.run(run))
            .collect::<Result<Vec<_>, _>>()?;
        let cost = last(&costs)?;
        Ok((cost.executed_per_pair(), cost.spread))
    };
    let (none, _) = pair("none")?;
    for mode in ["hwpt", "swpt"] {
        let (cycles, spread) = pair(mode)?;
        let extra = IOVAS_PER_PACKET * (cycles - none);
        let row = FindingRow::new(
            format!("{mode}: cycles of a packet beyond none"),
            "cycles",
            Measured::cost(extra, 0.0, spread),
        );
        found.push(
            row.beside(claims.printed(&[("id", "R26")], "value")?)
                .held_to(Demand::Near),
        );
        let lower = 100.0 * (1.0 - C_NONE / (C_NONE + extra));
        let row = FindingRow::new(
            format!("{mode}: stream throughput below none"),
            "%",
            Measured::timed(lower, spread),
        );
        found.push(
            row.beside(claims.printed(&[("id", "R25")], "value")?)
                .held_to(Demand::Near),
        );
    }
    found.explain(
        "The document's 200 cycles are those of the kernel's generic DMA code on the way to a pass-through domain. Here all identity modes \
         are the same code, and only what the hardware looks up differs: nothing is left to differ in the processor's cycles.",
    );
    found.note("Request-response, where the document finds no difference at all, follows: what is not executed cannot delay.");
    Ok(found)
}
