//! X17: FreeBSD's map and unmap, and the repair of its flush (EIOVAR section 7, Table 3).

use super::catalogue::{Experiment, Setting};
use super::finding::{Demand, FindingRow, Findings, Measured, Printed};
use super::model::{cycles_per_packet, gbps};
use super::printed::{C_NONE, CLOCK_GHZ, IOVAS_PER_PACKET, Sheet};
use super::stream::runs;
use super::x01_breakdown::components;
use crate::error::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X17",
    title: "FreeBSD: what it costs, and what flushing one entry instead of a page gains",
    source: "EIOVAR section 7, Table 3",
    measure,
};

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    // A flush of a page of entries is of consequence only where the walker does not snoop.
    let mut setting = setting.clone();
    setting.profile.coherent = false;
    let mut runs = runs(&setting)?;
    runs.truncate(2);
    let mut found = Findings::by(
        "Two runs of mlx stream on a platform whose walker does not snoop, so that write-backs are executed: FreeBSD as found, FreeBSD with \
         the flush repaired, Linux 3.4 with EIOVAR.",
    );
    let sheet = Sheet::named("eiovar_table3_freebsd")?;
    let inv = setting.profile.invalidation_cycles as f64;
    let literal = components(&setting, "freebsd", &runs)?;
    let fixed = components(&setting, "freebsd-fixed", &runs)?;
    let linux = components(&setting, "strict+", &runs)?;
    let spread = literal.order_spread.max(literal.repetition_spread);
    let c = literal.cycles;
    let iova_unmap = c.unmap_iova_find + c.unmap_iova_free;
    for (component, operation, executed, charged) in [
        ("iova", "map", c.map_iova_alloc, 0.0),
        ("all the rest", "map", c.map() - c.map_iova_alloc, 0.0),
        ("total", "map", c.map(), 0.0),
        ("iova", "unmap", iova_unmap, 0.0),
        ("all the rest", "unmap", c.unmap() - iova_unmap, inv),
        ("total", "unmap", c.unmap(), inv),
    ] {
        let wanted = [("component", component), ("operation", operation)];
        let measured = Measured::cost(executed, charged, spread);
        let row = FindingRow::new(format!("{operation}: {component}"), "cycles", measured);
        let row = row.beside(sheet.printed(&wanted, "value")?);
        found.push(match component {
            "total" => row.ordered_in("totals").held_to(Demand::Near),
            _ => row.ordered_in("parts"),
        });
    }
    let claims = Sheet::named("claims")?;
    let claim = |id| claims.printed(&[("id", id)], "value");
    let saved = c.unmap() - fixed.cycles.unmap();
    let row = FindingRow::new(
        "unmap: shorter by the repair",
        "cycles",
        Measured::cost(saved, 0.0, spread),
    );
    found.push(row.beside(claim("E20")?).held_to(Demand::Near));
    let pair = |c: &crate::meter::Cycles| c.map() + c.unmap() + inv;
    let speed = |c: &crate::meter::Cycles| {
        gbps(
            CLOCK_GHZ,
            cycles_per_packet(C_NONE, IOVAS_PER_PACKET, pair(c), 0.0),
        )
    };
    let gain = speed(&fixed.cycles) / speed(&literal.cycles);
    let row = FindingRow::new(
        "throughput: repaired over literal",
        "",
        Measured::timed(gain, spread),
    );
    let printed = Printed::derived(935.0 / 530.0, "claims.csv E21: 530 to 935 Mbit/s");
    found.push(row.beside(printed).held_to(Demand::Near));
    let slower = pair(&c) / pair(&linux.cycles);
    let row = FindingRow::new(
        "map and unmap: FreeBSD over Linux",
        "",
        Measured::timed(slower, spread),
    );
    found.push(row.beside(claim("E22")?).held_to(Demand::AtLeast));
    found.explain(
        "FreeBSD's other costs, locks and a busdma layer above the table among them, are not built here: only the allocator, the table that \
         gives empty pages back, and the flush of the whole page. The document's 9660 and 16003 cycles include everything.",
    );
    found.note("Executed write-backs are CLWB or CLFLUSHOPT of this processor; the document's flushed 64 lines by CLFLUSH.");
    Ok(found)
}
