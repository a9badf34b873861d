//! The second pass: the trace replayed with rings of several sizes, and with IOTLBs of several shapes.

use std::io::Read;

use ringfence_dma::ring::SlotChoice;
use ringfence_trace::{DeviceIndex, Operations};
use ringfence_types::Direction;

use super::advice::{RingAdvice, Stalls, TraceSizing, power};
use super::iotlb;
use super::slots::RingSlots;
use super::usage::{RingDemand, TraceDemand};
use crate::Profile;
use crate::compare::{self, Runner, runner};
use crate::error::LabError;
use crate::limits::ReplayLimits;
use crate::modes::Mode;
use crate::plan::{Plan, Planner, Step, each_plan};
use crate::replay::Outcomes;
use crate::ring::{RINGS, RingSizes, ring_index};

/// Sizes of a ring that are tried unless the caller names some.
const SIZES: usize = 8;

/// What to try.
#[derive(Debug, Clone)]
pub struct SizeOptions {
    /// Geometry of what is not swept.
    pub profile: Profile,
    /// Names of the devices to look at; none means all.
    pub devices: Option<Vec<String>>,
    /// Slots to try in every ring; none: around what each needs.
    pub entries: Vec<u32>,
    /// Modes under which the IOTLB is looked at; none leaves it out.
    pub modes: Vec<Mode>,
    /// Bounds on the replay.
    pub limits: ReplayLimits,
}

/// A ring of the sweep.
struct SweptRing {
    device: DeviceIndex,
    direction: Direction,
    advice: RingAdvice,
    /// By size, both choices.
    predicted: Vec<[RingSlots; 2]>,
}

/// The rings of one size each, on the driver.
struct RingTrial {
    in_order: Runner,
    any_order: Runner,
}

/// Sizes around what a ring needs: below it, where maps wait, the need itself, and above it until a ring that takes only its tail's slot
/// is served as well.
fn sizes(ring: &RingDemand) -> [u32; SIZES] {
    let most = u64::from(RingSizes::MAX_SLOTS);
    let need = ring.any_order_need.clamp(1, most);
    let power_of = |slots: u64| power(slots.clamp(1, most)).unwrap_or(RingSizes::MAX_SLOTS);
    let whole = power_of(need);
    let mut sizes = [
        (whole / 8).max(1),
        (whole / 4).max(1),
        (whole / 2).max(1),
        (need.saturating_sub(1)).max(1) as u32,
        need as u32,
        whole,
        power_of(ring.rule()),
        power_of(ring.in_order_need),
    ];
    sizes.sort_unstable();
    sizes
}

/// Replays a trace whose use of its rings is `usage`. `progress` is told the lines replayed so far.
///
/// # Errors
/// The trace is malformed, or a mode cannot be built.
pub fn size<R: Read>(
    name: &str,
    mut operations: Operations<R>,
    usage: &TraceDemand,
    options: &SizeOptions,
    mut progress: impl FnMut(u64),
) -> Result<TraceSizing, LabError> {
    let columns = match options.entries.len() {
        0 => SIZES,
        given => given,
    };
    let mut subjects: Vec<SweptRing> = usage
        .rings()
        .map(|(device, name, direction, ring)| {
            let mut advice = RingAdvice::new(name, &direction.to_string(), ring);
            let sizes = match options.entries.as_slice() {
                [] => sizes(ring).to_vec(),
                given => given.to_vec(),
            };
            advice.sweep = sizes.iter().map(|size| RingAdvice::point(*size)).collect();
            let both = |size: u32| {
                [SlotChoice::Tail, SlotChoice::NextFree].map(|c| RingSlots::new(c, size))
            };
            SweptRing {
                device,
                direction,
                advice,
                predicted: sizes.into_iter().map(both).collect(),
            }
        })
        .collect();
    let mut trials = (0..columns)
        .map(|column| trial(column, &subjects, options))
        .collect::<Result<Vec<_>, _>>()?;
    let mut shapes = iotlb::trials(&options.modes, &options.profile, options.limits)?;

    let mut planner = Planner::new().with_doorbells().with_limits(options.limits);
    let mut lines = 0;
    let only = options.devices.as_deref();
    each_plan(&mut operations, &mut planner, only, |_, plan, devices| {
        predict(&mut subjects, plan);
        let runners = trials
            .iter_mut()
            .flat_map(|trial| [&mut trial.in_order, &mut trial.any_order]);
        for runner in runners.chain(shapes.iter_mut().map(|trial| &mut trial.runner)) {
            runner.metered.run(plan, devices)?;
        }
        lines += plan.lines;
        progress(lines);
        Ok(())
    })?;
    let alive = planner.live_mappings();
    for (column, trial) in trials.iter_mut().enumerate() {
        let in_order = trial.in_order.metered.finish(&alive);
        let any_order = trial.any_order.metered.finish(&alive);
        for subject in &mut subjects {
            let place = subject.device.index() * RINGS + ring_index(subject.direction);
            let point = &mut subject.advice.sweep[column];
            let [tail, free] = subject.predicted[column].clone();
            point.in_order_predicted = tail.finish();
            point.any_order_predicted = free.finish();
            point.in_order = stalls(&in_order, place);
            point.any_order = stalls(&any_order, place);
        }
    }
    let iotlb = iotlb::advice(&mut shapes, &alive);
    let mut rings: Vec<RingAdvice> = subjects.into_iter().map(|subject| subject.advice).collect();
    for ring in &mut rings {
        ring.sweep.dedup_by_key(|point| point.entries);
    }
    let status = compare::status_of_trace(operations.summary(), &planner);
    Ok(TraceSizing {
        trace: name.to_owned(),
        status: status.to_string(),
        recommendation: TraceSizing::recommend(&rings, &iotlb),
        rings,
        iotlb,
    })
}

fn stalls(outcomes: &Outcomes, place: usize) -> Stalls {
    let ring = outcomes.rings.get(place).copied().unwrap_or_default();
    Stalls {
        stalls: ring.stalls,
        stalled_out: ring.stalled_out,
        refused: ring.refused,
    }
}

fn trial(
    column: usize,
    subjects: &[SweptRing],
    options: &SizeOptions,
) -> Result<RingTrial, LabError> {
    let mut counted: Vec<[u32; RINGS]> = Vec::new();
    for subject in subjects {
        let row = subject.device.index();
        if counted.len() <= row {
            counted.resize(row + 1, [1; RINGS]);
        }
        counted[row][ring_index(subject.direction)] = subject.advice.sweep[column].entries;
    }
    let options = compare::CompareOptions {
        limits: options.limits,
        profile: options.profile.clone(),
        repetitions: 0,
        attack: false,
        rings: RingSizes::Counted(counted),
        ..compare::CompareOptions::new()
    };
    let of = |name: &str| {
        let mode = Mode::find(name).ok_or_else(|| LabError::NoSuchMode(name.to_owned()))?;
        runner(&mode, &options)
    };
    Ok(RingTrial {
        in_order: of("riommu")?,
        any_order: of("riommu-ooo")?,
    })
}

fn predict(subjects: &mut [SweptRing], plan: &Plan) {
    for timed in &plan.steps {
        let (device, direction) = match timed.step {
            Step::Map {
                device, direction, ..
            }
            | Step::Unmap {
                device, direction, ..
            }
            | Step::EndBurst {
                device, direction, ..
            } => (device, direction),
            Step::Doorbell { .. } | Step::Tick => continue,
        };
        let own =
            |subject: &&mut SweptRing| subject.device == device && subject.direction == direction;
        if let Some(subject) = subjects.iter_mut().find(own) {
            for slots in subject.predicted.iter_mut().flatten() {
                slots.step(&timed.step);
            }
        }
    }
}
