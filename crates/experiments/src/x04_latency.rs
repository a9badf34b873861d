//! X04: round-trip times of request-response (rIOMMU Table 3).

use super::benchmarks::extra;
use super::catalogue::{Experiment, Setting};
use super::finding::{FindingRow, Findings, Measured};
use super::published::{Benchmark, CLOCK_GHZ, Nic, Sheet};
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X04",
    title: "Round-trip times of request-response",
    source: "rIOMMU Table 3",
    measure,
};

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(
        "Request-response on both adapters. The round trip without protection is the paper's. The \
        experiment adds the cycles of the server's maps and unmaps for one received and one sent \
        frame, at 3.1 GHz.",
    );
    let sheet = Sheet::named("riommu_table3")?;
    for nic in [Nic::Mlx, Nic::Brcm] {
        let cell = |mode| sheet.printed(&[("nic", nic.name()), ("mode", mode)], "value");
        let none = cell("none")?;
        let row = FindingRow::new(
            format!("{}: none", nic.name()),
            "us",
            Measured::cost(0.0, none.value, 0.0),
        );
        let base = none.value;
        found.push(row.beside(none).fitted());
        for (mode, cost) in extra(setting, nic, Benchmark::Rr)? {
            let microseconds =
                |cycles: Option<f64>| 2.0 * cycles.unwrap_or(0.0) / (CLOCK_GHZ * 1e3);
            let measured = Measured::cost(
                microseconds(cost.measured_part),
                base + microseconds(cost.modelled_part),
                cost.spread,
            );
            let row = FindingRow::new(format!("{}: {mode}", nic.name()), "us", measured);
            found.push(row.near(cell(mode)?).ordered_in(nic.name()));
        }
    }
    found.explain(
        "Modes whose measured work differs by a few hundred cycles differ by tenths of a \
        microsecond. The paper's differences are larger because its processor took longer for the \
        same work, and because of the cycles that erratum 2 leaves unexplained.",
    );
    found.note(
        "Taken from the paper, not measured: the round trip of none. All other rows are \
        predictions.",
    );
    found.note(
        "Erratum 5: the paper's text says 0.80 to 0.99 of the latency; its Table 3 yields 0.98 \
        at most.",
    );
    Ok(found)
}
