//! X27: shadow buffers beside strict modes and no protection (Markuze et al., ASPLOS 2016): at MTU
//! frames, and at 64 KiB segments.

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::NetperfStream;
use ringfence_lab::plan::{Plan, Step, TimedStep};
use ringfence_lab::{LabError, MachineProfile, Profile};
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

use super::capture::{CALL_NS, CallTotals, Capture, Run};
use super::finding::{FindingRow, Findings, Measured, NullModel, Published, Requirement};
use super::published::{BASELINE_CYCLES, Sheet};
use super::timed::{Cost, CountedSteps, TimedReplays, TimedSubject, run_in_turns};

/// The strict modes without copies, and `copy`.
const MODES: [&str; 4] = ["strict+", "linux-strict", "fence", COPY];
const COPY: &str = "copy";
/// Profile with the cost of a page without protection.
const PAGES_OF: &str = "ice-lake-2025";
/// Bytes of a segment, and of all segments that are mapped at once.
const SEGMENT: u64 = 64 << 10;
const RING: u32 = 64;
/// Address of the first segment.
const FIRST: u64 = 256 << 20;

/// A workload and the cycles that one unit of it, a packet or a segment, takes without protection.
struct Load {
    name: &'static str,
    runs: Vec<Run>,
    units: f64,
    baselines: Vec<(&'static str, f64)>,
}

/// Cycles of a unit in one mode.
struct UnitCost {
    mode: &'static str,
    measured: f64,
    modelled: f64,
    spread: f64,
}

impl UnitCost {
    fn cycles(&self) -> f64 {
        self.measured + self.modelled
    }
}

/// Runs the workloads with `packets` packets on each interface, and the copies on this CPU.
pub(super) fn measure(
    profile: &Profile,
    packets: u64,
    repetitions: usize,
) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(
        "Two runs of each workload, mode by mode in turn; the second counts. Copies are executed \
        on this CPU. Relative throughput is c / (c + map + unmap), with the measured and modelled \
        cycles of a packet or a segment. Segments of 64 KiB are mapped and unmapped in the order \
        of a ring of 64.",
    );
    let sheet = Sheet::named("copy_claims")?;
    let claim = |claim: &str| sheet.printed(&[("claim", claim)], "value");
    let most = claim("copy over the best strict mode at most")?;
    let least = claim("copy over none at least")?;
    let text = sheet.text(&[("claim", "copy over zero copy")], "value")?;
    let faster = Published::new(text, 1.0, "copy_claims.csv copy over zero copy");
    let mut largest = Measured::counted(f64::NEG_INFINITY);
    let mut words = Vec::new();
    for load in loads(packets)? {
        let costs = costs(profile, repetitions, &load)?;
        for cost in &costs {
            let what = format!("{}: {}, additional cycles", load.name, cost.mode);
            let cycles = Measured::cost(cost.measured, cost.modelled, 0.0);
            found.push(FindingRow::new(
                what,
                "cycles",
                cycles.with_spread(cost.spread),
            ));
        }
        let missing = LabError::Internal("a cost of each mode");
        let (copies, strict): (Vec<_>, Vec<_>) = costs.iter().partition(|cost| cost.mode == COPY);
        let best = strict
            .iter()
            .min_by(|a, b| a.cycles().total_cmp(&b.cycles()));
        let (Some(copy), Some(best)) = (copies.first(), best) else {
            return Err(missing);
        };
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
            let row = row.with_null_model(NullModel::RATIO).beside(faster.clone());
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

fn loads(packets: u64) -> Result<Vec<Load>, LabError> {
    let profiles = MachineProfile::builtin();
    let pages = profiles.iter().find(|profile| profile.name == PAGES_OF);
    let page = pages.and_then(|profile| profile.page_cycles);
    let page = page.ok_or(LabError::Internal("cost of a page"))?;
    let mut loads = Vec::new();
    for (name, adapter) in [
        ("mlx stream", NicProfile::MLX),
        ("brcm stream", NicProfile::BRCM),
    ] {
        let stream = NetperfStream::default();
        let mut capture = Capture::with(adapter, stream, adapter.rx_frames, packets)?;
        let runs = vec![capture.run()?, capture.run()?];
        loads.push(Load {
            name,
            units: runs[1].traffic.packets as f64,
            runs,
            baselines: vec![("", BASELINE_CYCLES)],
        });
    }
    for (name, direction) in [
        ("64 KiB segments sent", Direction::ToDevice),
        ("64 KiB segments received", Direction::FromDevice),
    ] {
        let count = (packets / 16).max(u64::from(2 * RING)) as u32;
        let runs = vec![segments(direction, count)?, segments(direction, count)?];
        loads.push(Load {
            name,
            units: f64::from(count),
            runs,
            baselines: vec![
                (", c of a packet", BASELINE_CYCLES),
                (", c of 16 pages", page * (SEGMENT / 4096) as f64),
            ],
        });
    }
    Ok(loads)
}

/// A run that maps and unmaps `count` segments, [`RING`] at once, in order.
fn segments(direction: Direction, count: u32) -> Result<Run, LabError> {
    let (device, cpu) = (DeviceIndex(0), 0);
    let mut plan = Plan {
        maps: u64::from(count),
        unmaps: u64::from(count),
        ..Plan::default()
    };
    for slot in 0..RING {
        let start = PhysAddr::new(FIRST + u64::from(slot) * SEGMENT);
        let segment = PhysRange::new(start, SEGMENT).ok_or(LabError::Internal("a segment"))?;
        plan.segments.push(segment);
    }
    let mut push = |step| {
        let time = Nanos((plan.steps.len() as u64 + 1) * CALL_NS);
        plan.steps.push(TimedStep { time, step });
    };
    for number in 0..count + RING {
        let id = MappingId(number % RING);
        if number >= RING {
            push(Step::Unmap {
                id,
                device,
                cpu,
                direction,
            });
        }
        if number < count {
            push(Step::Map {
                id,
                device,
                cpu,
                direction,
                first: number % RING,
                count: 1,
            });
        }
    }
    let ring = u16::from(direction == Direction::ToDevice);
    Ok(Run {
        step_rings: vec![ring; plan.steps.len()],
        rings: vec![ring],
        traffic: CallTotals {
            packets: u64::from(count),
            ..CallTotals::default()
        },
        plan,
    })
}

/// Returns the cycles of a unit of `load` in each of [`MODES`], from its last run.
fn costs(profile: &Profile, repetitions: usize, load: &Load) -> Result<Vec<UnitCost>, LabError> {
    let replays = |mode| TimedReplays::new(TimedSubject::from_name(mode)?, profile, repetitions);
    let replays = MODES.into_iter().map(replays);
    let mut replays = replays.collect::<Result<Vec<_>, _>>()?;
    let mut costs = Vec::new();
    for run in &load.runs {
        costs = run_in_turns(&mut replays, run, CountedSteps::All)?;
    }
    let invalidation = profile.invalidation_cycles as f64;
    let unit = |(mode, cost): (&'static str, &Cost)| UnitCost {
        mode,
        measured: cost.measured / load.units,
        modelled: cost.invalidations as f64 * invalidation / load.units,
        spread: cost.spread / load.units,
    };
    Ok(MODES.into_iter().zip(&costs).map(unit).collect())
}

/// Throughput of a mode as a share of that without protection.
fn relative(c: f64, cost: &UnitCost) -> Measured {
    let share = |cycles: f64| c / (c + cycles.max(0.0));
    let half = cost.spread / 2.0;
    let spread = share(cost.cycles() - half) - share(cost.cycles() + half);
    Measured::counted(share(cost.cycles())).with_spread(spread)
}

/// Throughput of `copy` over that of `strict`.
fn over(c: f64, copy: &UnitCost, strict: &UnitCost) -> Measured {
    let ratio = |sign: f64| {
        (c + strict.cycles() + sign * strict.spread / 2.0)
            / (c + (copy.cycles() - sign * copy.spread / 2.0).max(0.0))
    };
    Measured::counted(ratio(0.0)).with_spread(ratio(1.0) - ratio(-1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(mode: &'static str, measured: f64, modelled: f64, spread: f64) -> UnitCost {
        UnitCost {
            mode,
            measured,
            modelled,
            spread,
        }
    }

    #[test]
    fn ratios_follow_the_cycles() {
        let copy = cost(COPY, 600.0, 0.0, 0.0);
        let strict = cost("fence", 300.0, 4300.0, 0.0);
        assert!((relative(1800.0, &copy).median - 0.75).abs() < 1e-12);
        assert!((over(1800.0, &copy, &strict).median - 6400.0 / 2400.0).abs() < 1e-12);
        assert_eq!(over(1800.0, &copy, &strict).spread, 0.0);
        let noisy = cost(COPY, 600.0, 0.0, 200.0);
        let wanted = 1800.0 / 2300.0 - 1800.0 / 2500.0;
        assert!((relative(1800.0, &noisy).spread - wanted).abs() < 1e-12);
    }

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

    #[test]
    fn segments_are_unmapped_in_order() {
        let run = segments(Direction::ToDevice, 130).unwrap();
        let mut live = std::collections::VecDeque::new();
        let mut most = 0;
        for timed in &run.plan.steps {
            match timed.step {
                Step::Map { id, first, .. } => {
                    assert!(!live.contains(&id) && first == id.0);
                    live.push_back(id);
                }
                Step::Unmap { id, .. } => assert_eq!(live.pop_front(), Some(id)),
                _ => panic!("another step"),
            }
            most = most.max(live.len());
        }
        assert!(live.is_empty());
        assert_eq!((most, run.plan.steps.len()), (64, 260));
    }
}
