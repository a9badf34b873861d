//! The workloads of X27 and X28, and the cycles that a mode adds to a packet or a segment.

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::NetperfStream;
use ringfence_lab::plan::{Plan, Step, TimedStep};
use ringfence_lab::{LabError, MachineProfile, Profile};
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

use super::capture::{CALL_NS, CallTotals, Capture, Run};
use super::finding::{FindingRow, Measured};
use super::published::BASELINE_CYCLES;
use super::timed::{Cost, CountedSteps, TimedReplays, TimedSubject, run_in_turns};

/// Profile with the cost of a page without protection.
pub(super) const PAGES_OF: &str = "ice-lake-2025";
/// Bytes of a segment, and of all segments that are mapped at once.
const SEGMENT: u64 = 64 << 10;
const RING: u32 = 64;
/// Address of the first segment.
const FIRST: u64 = 256 << 20;

/// Sentences on the workloads and the throughput, for the method of a finding.
pub(super) const METHOD: &str = "Two runs of each workload, mode by mode in turn; the second \
    counts. Copies are executed on this CPU. Relative throughput is c / (c + map + unmap), with \
    the measured and modelled cycles of a packet or a segment. Segments of 64 KiB are mapped and \
    unmapped in the order of a ring of 64.";

/// A workload and the cycles that one unit of it, a packet or a segment, takes without protection.
pub(super) struct Load {
    pub(super) name: &'static str,
    pub(super) runs: Vec<Run>,
    pub(super) units: f64,
    pub(super) baselines: Vec<(&'static str, f64)>,
}

/// Cycles of a unit in one mode.
pub(super) struct UnitCost {
    pub(super) mode: &'static str,
    pub(super) measured: f64,
    pub(super) modelled: f64,
    pub(super) spread: f64,
}

impl UnitCost {
    pub(super) fn cycles(&self) -> f64 {
        self.measured + self.modelled
    }

    /// Returns the row of this cost.
    pub(super) fn row(&self, load: &Load) -> FindingRow {
        let what = format!("{}: {}, additional cycles", load.name, self.mode);
        let cycles = Measured::cost(self.measured, self.modelled, 0.0);
        FindingRow::new(what, "cycles", cycles.with_spread(self.spread))
    }
}

/// Returns the workloads: streams on both adapters, and segments in both directions.
pub(super) fn loads(packets: u64) -> Result<Vec<Load>, LabError> {
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

/// Returns the cycles of a unit of `load` in each of `modes`, from its last run.
pub(super) fn costs(
    modes: &[&'static str],
    profile: &Profile,
    repetitions: usize,
    load: &Load,
) -> Result<Vec<UnitCost>, LabError> {
    let replays = |mode: &&'static str| {
        TimedReplays::new(TimedSubject::from_name(mode)?, profile, repetitions)
    };
    let replays = modes.iter().map(replays);
    let mut replays = replays.collect::<Result<Vec<_>, _>>()?;
    let mut costs = Vec::new();
    for run in &load.runs {
        costs = run_in_turns(&mut replays, run, CountedSteps::All)?;
    }
    let invalidation = profile.invalidation_cycles as f64;
    let unit = |(&mode, cost): (&&'static str, &Cost)| UnitCost {
        mode,
        measured: cost.measured / load.units,
        modelled: cost.invalidations as f64 * invalidation / load.units,
        spread: cost.spread / load.units,
    };
    Ok(modes.iter().zip(&costs).map(unit).collect())
}

/// Throughput of a mode as a share of that without protection.
pub(super) fn relative(c: f64, cost: &UnitCost) -> Measured {
    let share = |cycles: f64| c / (c + cycles.max(0.0));
    let half = cost.spread / 2.0;
    let spread = share(cost.cycles() - half) - share(cost.cycles() + half);
    Measured::counted(share(cost.cycles())).with_spread(spread)
}

/// Throughput of `better` over that of `other`.
pub(super) fn over(c: f64, better: &UnitCost, other: &UnitCost) -> Measured {
    let ratio = |sign: f64| {
        (c + other.cycles() + sign * other.spread / 2.0)
            / (c + (better.cycles() - sign * better.spread / 2.0).max(0.0))
    };
    Measured::counted(ratio(0.0)).with_spread(ratio(1.0) - ratio(-1.0))
}

/// Returns the cost of `mode`, and the least of the others in `costs` that `among` names.
pub(super) fn against<'a>(
    costs: &'a [UnitCost],
    mode: &str,
    among: &[&str],
) -> Result<(&'a UnitCost, &'a UnitCost), LabError> {
    let own = costs.iter().find(|cost| cost.mode == mode);
    let others = costs.iter().filter(|cost| among.contains(&cost.mode));
    let least = others.min_by(|a, b| a.cycles().total_cmp(&b.cycles()));
    own.zip(least)
        .ok_or(LabError::Internal("a cost of each mode"))
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
        let copy = cost("copy", 600.0, 0.0, 0.0);
        let strict = cost("fence", 300.0, 4300.0, 0.0);
        assert!((relative(1800.0, &copy).median - 0.75).abs() < 1e-12);
        assert!((over(1800.0, &copy, &strict).median - 6400.0 / 2400.0).abs() < 1e-12);
        assert_eq!(over(1800.0, &copy, &strict).spread, 0.0);
        let noisy = cost("copy", 600.0, 0.0, 200.0);
        let wanted = 1800.0 / 2300.0 - 1800.0 / 2500.0;
        assert!((relative(1800.0, &noisy).spread - wanted).abs() < 1e-12);
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
