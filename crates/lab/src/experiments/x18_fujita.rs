//! X18: five configurations of a kernel on a driver that maps, transfers nothing and unmaps (Fujita and Moriai Table 1, Fig. 4).

use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

use super::capture::{CALL_NS, Run};
use super::catalogue::{Experiment, Setting};
use super::finding::{Demand, FindingRow, Findings, Measured, Printed};
use super::printed::Sheet;
use super::timed::{Cost, Subject, Timed};
use crate::error::LabError;
use crate::plan::{Step, Timed as At};

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X18",
    title: "Five configurations on a driver that only pretends",
    source: "Fujita and Moriai Table 1, Fig. 4, sections 3.2 and 3.3",
    measure,
};

/// Clock of the document's processor (section 3.2).
const CLOCK: f64 = 3.0e9;
/// Page frames that requests are for (decision 0011).
const FRAMES: u64 = 4096;

/// Requests of 1024 bytes, one after the other, each mapped and unmapped: the calls of `PseudoScsi`.
pub(super) fn requests(count: u64, first: u64) -> Result<Run, LabError> {
    let mut run = Run::default();
    let mut push = |number: u64, step| {
        run.plan.steps.push(At {
            time: Nanos(number * CALL_NS * 55),
            step,
        });
        run.lanes.push(0);
    };
    for number in first..first + count {
        let at = PhysAddr::new((1 << 20) + number % FRAMES * 4096);
        let memory = PhysRange::new(at, 1024).ok_or(LabError::Internal("frame"))?;
        run.plan.segments.push(memory);
        let (device, cpu, id) = (DeviceIndex(0), 0, MappingId(0));
        let direction = Direction::FromDevice;
        let first = (run.plan.segments.len() - 1) as u32;
        let map = Step::Map {
            id,
            device,
            cpu,
            direction,
            first,
            count: 1,
        };
        push(2 * number, map);
        let unmap = Step::Unmap {
            id,
            device,
            cpu,
            direction,
        };
        push(2 * number + 1, unmap);
    }
    run.plan.maps = count;
    run.plan.unmaps = count;
    run.rings = vec![0];
    Ok(run)
}

/// Costs of a request in a mode, after as many requests as there are frames.
fn cost(setting: &Setting, mode: &str) -> Result<Cost, LabError> {
    let mut timed = Timed::new(Subject::named(mode)?, &setting.profile, setting.repetitions)?;
    timed.run(&requests(FRAMES, 0)?)?;
    timed.run(&requests(50_000, FRAMES)?)
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::by(
        "54,096 requests of 1024 bytes, one at a time, on the mapping layer of each configuration; a request without protection costs what \
         the document's numbers say: 3.0 GHz / 124,337 IOPS, less the 20% that the default configuration costs there.",
    );
    let facts = Sheet::named("fujita_facts")?;
    let fact = |name: &str| facts.printed(&[("fact", name)], "value");
    let iops = fact("IOPS of default (1024-B I/O, 1 outstanding)")?;
    let penalty = fact("IOMMU penalty, standard kernel")?;
    let c_none = CLOCK / iops.value * (1.0 - penalty.value / 100.0);
    let percent = |printed: Printed, value: f64| Printed {
        text: format!("{} -> {value:.1}", printed.text),
        value,
        ..printed
    };
    let after = fact("IOMMU penalty after change")?;
    let two = fact("strict vs strict bitmap")?;
    let default = 100.0 - penalty.value;
    let document = [
        ("disabled", "none", percent(penalty.clone(), 100.0)),
        ("default", "defer", percent(penalty.clone(), default)),
        ("strict", "strict", percent(penalty.clone(), default)),
        (
            "bitmap",
            "bitmap",
            percent(after.clone(), 100.0 - after.value),
        ),
        (
            "strict bitmap",
            "strict-bitmap",
            percent(two.clone(), default * (1.0 + two.value / 100.0)),
        ),
    ];
    let mut speeds = Vec::new();
    for (name, mode, printed) in document {
        let cost = cost(setting, mode)?;
        let charged = c_none + cost.charged_per_pair(&setting.profile);
        let executed = if mode == "none" {
            0.0
        } else {
            cost.executed_per_pair()
        };
        let request = Measured::cost(executed, charged, cost.spread);
        found.push(FindingRow::new(
            format!("{name}: cycles of a request"),
            "cycles",
            request,
        ));
        let speed = 100.0 * c_none / request.median;
        speeds.push((name, speed));
        let row = FindingRow::new(
            format!("{name}: requests a second, disabled = 100"),
            "",
            Measured::timed(speed, cost.spread * executed / request.median),
        );
        found.push(
            row.beside(printed)
                .held_to(Demand::Near)
                .ordered_in("requests a second"),
        );
    }
    let of = |name: &str| {
        speeds
            .iter()
            .find(|(n, _)| *n == name)
            .map_or(f64::NAN, |(_, s)| *s)
    };
    let better = 100.0 * (of("strict bitmap") / of("strict") - 1.0);
    let row = FindingRow::new(
        "strict bitmap over strict",
        "%",
        Measured::timed(better, 0.0),
    );
    found.push(row.beside(two).held_to(Demand::Near));
    found.explain(
        "The document's strict hardly differs from its default: with one request at a time, its flush of a single entry cost next to nothing. \
         The profile charges 2150 cycles for each (rIOMMU), which is a ninth of a request, so here strict is slower than default by that.",
    );
    found.explain(
        "The document's default loses 20%, about 4800 cycles a request on a processor of 2007: allocator, locks and table. What is executed \
         here for the same work is a fraction of that, so the orders among modes that flush alike stand, and the distances shrink.",
    );
    found.note("Erratum 13: the document's table of 256 entries has 512; the walk here is of four levels of 512.");
    found.note("C of a request is derived from printed numbers (124,337 IOPS and 20%); nothing is fitted to a measurement.");
    Ok(found)
}
