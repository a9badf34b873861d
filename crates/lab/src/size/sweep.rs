//! Replays a trace with several ring sizes and IOTLB geometries, and counts the maps that stall.
//!
//! One trial replays the whole trace with one size for each ring. All rings therefore have the same
//! number of sizes (columns); a ring with fewer distinct sizes repeats some, and the result drops
//! them.

use std::io::Read;

use ringfence_dma::ring::SlotChoice;
use ringfence_trace::{DeviceIndex, MappingId, Operations};
use ringfence_types::Direction;

use super::advice::{IotlbAdvice, RingAdvice, Stalls, TraceSizing, power};
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

/// Number of sizes to try if the caller names none.
const SIZES: usize = 8;

/// Memory for the replays of one reading.
const REPLAYS_BYTES: u64 = 96 << 20;

/// Replays of one reading: all of them for most traces, one for a trace that takes much memory.
fn replays_per_reading(usage: &TraceDemand) -> usize {
    (REPLAYS_BYTES / usage.replay_bytes()).clamp(1, 64) as usize
}

/// The sizes and geometries to try.
#[derive(Debug, Clone)]
pub struct SizeOptions {
    /// The profile; the sweeps replace its IOTLB geometry.
    pub profile: Profile,
    /// Names of the devices to replay; `None` for all.
    pub devices: Option<Vec<String>>,
    /// Slots to try in every ring; if empty, sizes around each ring's need.
    pub entries: Vec<u32>,
    /// Modes for the IOTLB sweep; if empty, that sweep is skipped.
    pub modes: Vec<Mode>,
    /// Limits on the replay.
    pub limits: ReplayLimits,
}

/// A ring of the sweep.
struct SweptRing {
    device: DeviceIndex,
    direction: Direction,
    advice: RingAdvice,
    /// Models by size, one for each slot choice.
    predicted: Vec<[RingSlots; 2]>,
}

/// One replay of the sweep: the size of every ring, by its column, and the choice of slots.
#[derive(Clone, Copy)]
struct RingTrial {
    column: usize,
    choice: SlotChoice,
}

/// Returns sizes around a ring's need: smaller ones, at which maps wait; the need itself; and
/// larger ones, up to the need of a ring that uses only the slot at its tail.
fn sizes_to_try(ring: &RingDemand) -> [u32; SIZES] {
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

/// Returns the number of times that [`advise`] reads the trace.
pub fn readings(usage: &TraceDemand, options: &SizeOptions) -> u64 {
    let rings = ring_trials(options)
        .len()
        .div_ceil(replays_per_reading(usage));
    let iotlbs = iotlb::shapes(&options.modes)
        .count()
        .div_ceil(replays_per_reading(usage));
    (rings + iotlbs) as u64
}

fn ring_trials(options: &SizeOptions) -> Vec<RingTrial> {
    let columns = match options.entries.len() {
        0 => SIZES,
        count => count,
    };
    let both = |column| {
        [SlotChoice::Tail, SlotChoice::NextFree].map(|choice| RingTrial { column, choice })
    };
    (0..columns).flat_map(both).collect()
}

/// Replays a trace whose rings need `usage`. Reads the trace [`readings`] times, each time through
/// `open`: replays that would take too much memory together take turns. Passes the number of lines
/// replayed so far to `progress`.
///
/// # Errors
/// The trace is malformed, exceeds a limit or cannot be opened, or a mode cannot be built.
pub fn advise<R: Read, E: From<LabError>>(
    name: &str,
    mut open: impl FnMut() -> Result<Operations<R>, E>,
    usage: &TraceDemand,
    options: &SizeOptions,
    mut progress: impl FnMut(u64),
) -> Result<TraceSizing, E> {
    let mut reading = Reading {
        options,
        lines: 0,
        progress: &mut progress,
        status: None,
    };
    let rings = sweep_rings(&mut reading, &mut open, usage, options)?;
    let iotlb = sweep_iotlbs(&mut reading, &mut open, usage, options)?;
    Ok(TraceSizing {
        trace: name.to_owned(),
        status: reading.status.unwrap_or_default(),
        recommendation: TraceSizing::recommend(&rings, &iotlb),
        rings,
        iotlb,
    })
}

/// Replays the trace with each size of every ring.
fn sweep_rings<R: Read, E: From<LabError>>(
    reading: &mut Reading<'_>,
    open: &mut impl FnMut() -> Result<Operations<R>, E>,
    usage: &TraceDemand,
    options: &SizeOptions,
) -> Result<Vec<RingAdvice>, E> {
    let mut rings: Vec<SweptRing> = usage
        .rings()
        .map(|(device, name, direction, ring)| swept_ring(device, name, direction, ring, options))
        .collect();
    let trials = ring_trials(options);
    for (group, trial_group) in trials.chunks(replays_per_reading(usage)).enumerate() {
        let mut runners = trial_group
            .iter()
            .map(|trial| trial.runner(&rings, options))
            .collect::<Result<Vec<_>, _>>()?;
        let live_mappings = reading.replay(open()?, runners.iter_mut().collect(), |plan| {
            if group == 0 {
                predict(&mut rings, plan);
            }
        })?;
        for (trial, runner) in trial_group.iter().zip(&mut runners) {
            let outcomes = runner.metered.finish(&live_mappings);
            for ring in &mut rings {
                let ring_number = ring.device.index() * RINGS + ring_index(ring.direction);
                let point = &mut ring.advice.sweep[trial.column];
                match trial.choice {
                    SlotChoice::Tail => point.in_order = stalls(&outcomes, ring_number),
                    SlotChoice::NextFree => point.any_order = stalls(&outcomes, ring_number),
                }
            }
        }
    }
    Ok(rings.into_iter().map(SweptRing::finish).collect())
}

/// Replays the trace with each IOTLB geometry of every mode.
fn sweep_iotlbs<R: Read, E: From<LabError>>(
    reading: &mut Reading<'_>,
    open: &mut impl FnMut() -> Result<Operations<R>, E>,
    usage: &TraceDemand,
    options: &SizeOptions,
) -> Result<Vec<IotlbAdvice>, E> {
    let mut points = Vec::new();
    let shapes: Vec<_> = iotlb::shapes(&options.modes).collect();
    for shape_group in shapes.chunks(replays_per_reading(usage)) {
        let mut runners = shape_group
            .iter()
            .map(|shape| shape.runner(&options.profile, options.limits))
            .collect::<Result<Vec<_>, _>>()?;
        let live_mappings = reading.replay(open()?, runners.iter_mut().collect(), |_| {})?;
        for (shape, runner) in shape_group.iter().zip(&mut runners) {
            points.push((
                shape.clone(),
                runner.metered.finish(&live_mappings).hardware,
            ));
        }
    }
    Ok(iotlb::advice(&points))
}

impl SweptRing {
    /// Adds the predictions to the advice, sorts its points by size and drops repeated sizes.
    fn finish(self) -> RingAdvice {
        let mut advice = self.advice;
        for (point, [tail, free]) in advice.sweep.iter_mut().zip(self.predicted) {
            point.in_order_predicted = tail.finish();
            point.any_order_predicted = free.finish();
        }
        advice.sweep.sort_by_key(|point| point.entries);
        advice.sweep.dedup_by_key(|point| point.entries);
        advice
    }
}

fn swept_ring(
    device: DeviceIndex,
    name: &str,
    direction: Direction,
    ring: &RingDemand,
    options: &SizeOptions,
) -> SweptRing {
    let mut advice = RingAdvice::new(name, &direction.to_string(), ring);
    let sizes = match options.entries.as_slice() {
        [] => sizes_to_try(ring).to_vec(),
        entries => entries.to_vec(),
    };
    advice.sweep = sizes.iter().map(|size| RingAdvice::point(*size)).collect();
    let both =
        |size: u32| [SlotChoice::Tail, SlotChoice::NextFree].map(|c| RingSlots::new(c, size));
    SweptRing {
        device,
        direction,
        advice,
        predicted: sizes.into_iter().map(both).collect(),
    }
}

/// State across the readings of the trace.
struct Reading<'a> {
    options: &'a SizeOptions,
    lines: u64,
    progress: &'a mut dyn FnMut(u64),
    /// Status of the trace, from the first reading.
    status: Option<String>,
}

impl Reading<'_> {
    /// Replays the trace on `runners` and returns the live mappings at its end.
    fn replay<R: Read>(
        &mut self,
        mut operations: Operations<R>,
        mut runners: Vec<&mut Runner>,
        mut on_plan: impl FnMut(&Plan),
    ) -> Result<Vec<(MappingId, DeviceIndex)>, LabError> {
        let mut planner = Planner::new()
            .with_doorbells()
            .with_limits(self.options.limits);
        let only = self.options.devices.as_deref();
        each_plan(&mut operations, &mut planner, only, |_, plan, devices| {
            on_plan(plan);
            for runner in &mut runners {
                runner.metered.run(plan, devices)?;
            }
            self.lines += plan.lines;
            (self.progress)(self.lines);
            Ok(())
        })?;
        let status = || compare::status_of_trace(operations.summary(), &planner).to_string();
        self.status.get_or_insert_with(status);
        Ok(planner.live_mappings())
    }
}

fn stalls(outcomes: &Outcomes, ring_number: usize) -> Stalls {
    let ring = outcomes.rings.get(ring_number).copied().unwrap_or_default();
    Stalls {
        stalls: ring.stalls,
        stalled_out: ring.stalled_out,
        refused: ring.refused,
    }
}

impl RingTrial {
    fn runner(self, rings: &[SweptRing], options: &SizeOptions) -> Result<Runner, LabError> {
        let mut counted: Vec<[u32; RINGS]> = Vec::new();
        for ring in rings {
            let row = ring.device.index();
            if counted.len() <= row {
                counted.resize(row + 1, [1; RINGS]);
            }
            let entries = ring.advice.sweep[self.column].entries;
            counted[row][ring_index(ring.direction)] = entries;
        }
        let options = compare::CompareOptions {
            limits: options.limits,
            profile: options.profile.clone(),
            repetitions: 0,
            attack: false,
            rings: RingSizes::Counted(counted),
            ..compare::CompareOptions::new()
        };
        let name = match self.choice {
            SlotChoice::Tail => "riommu",
            SlotChoice::NextFree => "riommu-ooo",
        };
        let mode = Mode::find(name).ok_or_else(|| LabError::NoSuchMode(name.to_owned()))?;
        runner(&mode, &options)
    }
}

fn predict(rings: &mut [SweptRing], plan: &Plan) {
    for step in &plan.steps {
        let (device, direction) = match step.step {
            Step::Map {
                device, direction, ..
            }
            | Step::Unmap {
                device, direction, ..
            }
            | Step::EndBurst {
                device, direction, ..
            } => (device, direction),
            Step::Doorbell { .. } | Step::EndDescriptor { .. } | Step::Tick => continue,
        };
        let is_swept = |ring: &&mut SweptRing| ring.device == device && ring.direction == direction;
        if let Some(ring) = rings.iter_mut().find(is_swept) {
            for slots in ring.predicted.iter_mut().flatten() {
                slots.step(&step.step);
            }
        }
    }
}
