//! X09: how bursts spread an invalidation, and when a ring overflows (rIOMMU section 4).

use std::collections::HashMap;

use ringfence_devices::nic::Profile as Adapter;
use ringfence_devices::workload::{PACKETS_PER_RUN, Stream};

use super::capture::{Capture, Run};
use super::catalogue::{Experiment, Setting};
use super::figure::{Figure, Series};
use super::finding::{Demand, FindingRow, Findings, Measured, Printed};
use super::printed::Sheet;
use super::timed::{Subject, Timed};
use crate::error::LabError;
use crate::plan::Step;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X09",
    title: "Bursts against amortised invalidation; ring size against overflow",
    source: "rIOMMU section 4",
    measure,
};

const BURSTS: [u32; 10] = [1, 2, 5, 10, 20, 50, 100, 200, 300, 400];

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::by(
        "mlx stream with interrupts at 1 to 400 completions: two buffers each, so a burst is twice as many unmaps. The ring driver \
         runs the calls; its slots are counted with those that wait for the end of a burst.",
    );
    let (mut charged, mut executed) = (Vec::new(), Vec::new());
    for burst in BURSTS {
        let mut capture = Capture::with(Adapter::MLX, Stream::default(), burst, PACKETS_PER_RUN)?;
        let mut timed = Timed::new(Subject::Rings, &setting.profile, setting.repetitions)?;
        // The first run fills the rings.
        timed.run(&capture.run()?)?;
        let run = capture.run()?;
        let cost = timed.run(&run)?;
        let unmaps = run.plan.unmaps as f64;
        let each = cost.invalidations as f64 * setting.profile.invalidation_cycles as f64 / unmaps;
        charged.push((unmaps / cost.invalidations as f64, each));
        executed.push((unmaps / cost.invalidations as f64, cost.executed_per_pair()));
        let measured = Measured::cost(cost.executed_per_pair(), each, cost.spread);
        let what = format!("interrupt at {burst}: map, unmap and share of the invalidation");
        found.push(FindingRow::new(what, "cycles", measured));
        if burst == 100 {
            let bursts = Sheet::named("claims")?.printed(&[("id", "R23")], "value")?;
            let row = FindingRow::new(
                "interrupt at 100 packets: unmaps of a burst",
                "",
                Measured::counted(unmaps / cost.invalidations as f64),
            );
            found.push(row.beside(bursts).held_to(Demand::Near));
            let wanted = [
                ("mode", "riommu"),
                ("quantity", "amortised rIOTLB invalidation = 2150/200"),
            ];
            let printed = Sheet::named("riommu_fig7_fig8_anchors")?.printed(&wanted, "value")?;
            let row = FindingRow::new(
                "interrupt at 100 packets: share of the invalidation in an unmap",
                "cycles",
                Measured::cost(0.0, each, 0.0),
            );
            found.push(row.beside(printed).held_to(Demand::Near));
        }
    }
    overflow(&mut found)?;
    found.figures.push(Figure {
        title: "Cost of an unmap by the length of its burst".into(),
        x: "unmaps of a burst",
        y: "cycles",
        log_x: true,
        series: vec![
            Series::line("charged: share of the invalidation", charged),
            Series::line("executed: map and unmap", executed),
        ],
    });
    found.explain(
        "An interrupt at 100 received packets ends a burst of 200 unmaps; the transmit rings' bursts are shorter, for an acknowledgement \
         follows two packets, and the mean over both is below 200.",
    );
    found.note("Erratum 8: until a burst ends, its last entries stay reachable; the repaired ring withholds their buffers.");
    found.note(
        "N >= L avoids overflow in the document. A slot freed in a burst may not be given out before its invalidation, so here \
         N >= L and the longest burst.",
    );
    Ok(found)
}

/// Most slots in use in a ring: mapped, and mapped or waiting for the end of a burst.
fn most(run: &Run) -> HashMap<u16, (u32, u32)> {
    let mut rings: HashMap<u16, (u32, u32)> = HashMap::new();
    let mut most: HashMap<u16, (u32, u32)> = HashMap::new();
    for (timed, lane) in run.plan.steps.iter().zip(&run.lanes) {
        let (live, waiting) = rings.entry(*lane).or_default();
        match timed.step {
            Step::Map { .. } => *live += 1,
            Step::Unmap { .. } => {
                *live = live.saturating_sub(1);
                *waiting += 1;
            }
            Step::EndBurst { .. } => *waiting = 0,
            Step::Doorbell { .. } | Step::Tick => {}
        }
        let largest = most.entry(*lane).or_default();
        largest.0 = largest.0.max(*live);
        largest.1 = largest.1.max(*live + *waiting);
    }
    most
}

/// Counts from the beginning, when rings are empty.
fn overflow(found: &mut Findings) -> Result<(), LabError> {
    let mut capture = Capture::new(Adapter::MLX, Stream::default())?;
    let run = capture.run()?;
    let (live, busy) = most(&run).into_values().fold((0, 0), |most, ring| {
        (most.0.max(ring.0), most.1.max(ring.1))
    });
    let row = FindingRow::new(
        "largest ring: live addresses (L)",
        "",
        Measured::counted(f64::from(live)),
    );
    let printed = Sheet::named("claims")?
        .printed(&[("id", "R51")], "value")?
        .read_as(8192.0);
    found.push(row.beside(printed).held_to(Demand::AtMost));
    let row = FindingRow::new(
        "largest ring: N that never overflows",
        "",
        Measured::counted(f64::from(busy)),
    );
    let printed = Printed {
        text: "L".into(),
        value: f64::from(live),
        source: "claims.csv R52".into(),
    };
    found.push(row.beside(printed).held_to(Demand::AtLeast));
    let mut points = Vec::new();
    for share in 1..=24 {
        let slots = busy * share / 20;
        points.push((f64::from(slots), 100.0 * refused(&run, slots)));
    }
    found.figures.push(Figure {
        title: "Maps that find their ring full, by its size".into(),
        x: "N",
        y: "% of maps",
        log_x: false,
        series: vec![Series::line("largest ring", points)],
    });
    Ok(())
}

/// Share of maps that find a ring of `slots` full. Such a map is left out, and so is its unmap.
fn refused(run: &Run, slots: u32) -> f64 {
    let mut busy: HashMap<u16, (u32, u32)> = HashMap::new();
    let mut out = std::collections::HashSet::new();
    let (mut maps, mut full) = (0_u64, 0_u64);
    for (timed, lane) in run.plan.steps.iter().zip(&run.lanes) {
        let (live, waiting) = busy.entry(*lane).or_default();
        match timed.step {
            Step::Map { id, .. } => {
                maps += 1;
                if *live + *waiting < slots {
                    *live += 1;
                } else {
                    full += 1;
                    out.insert(id);
                }
            }
            Step::Unmap { id, .. } if !out.remove(&id) => {
                *live = live.saturating_sub(1);
                *waiting += 1;
            }
            Step::EndBurst { .. } => *waiting = 0,
            Step::Unmap { .. } | Step::Doorbell { .. } | Step::Tick => {}
        }
    }
    full as f64 / maps.max(1) as f64
}
