//! Counts the demand of a trace on each ring in one pass. Ring sizes follow from these counts.

use std::collections::VecDeque;
use std::io::Read;

use ringfence_trace::{DeviceIndex, Devices, Operations};
use ringfence_types::Direction;

use super::bursts::Bursts;
use super::ranks::Ranks;
use crate::error::LabError;
use crate::limits::ReplayLimits;
use crate::plan::{Plan, Planner, Step, each_plan};
use crate::ring::{RINGS, ring_index};

/// Demand on one ring with an unlimited number of slots.
#[derive(Debug, Clone, Default)]
pub struct RingDemand {
    /// Number of maps; a scatterlist counts as one.
    pub maps: u64,
    /// Number of unmaps.
    pub unmaps: u64,
    /// Number of slots taken; each segment of a scatterlist takes one.
    pub slots: u64,
    /// L: peak number of mapped slots.
    pub live_max: u64,
    /// D: peak number of live mappings.
    pub mappings_max: u64,
    /// K: slots of the largest mapping.
    pub pieces_max: u64,
    /// Slots of the longest burst of unmaps.
    pub burst_max: u64,
    /// B: peak number of slots that the open bursts of all CPUs withhold.
    pub withheld_max: u64,
    /// Peak number of mapped or withheld slots at a map: the need of a ring that uses any free
    /// slot.
    pub any_order_need: u64,
    /// Peak distance in slots from the oldest mapped or withheld slot to the newest: the need of a
    /// ring that uses only the slot at its tail.
    pub in_order_need: u64,
    /// Unmaps of a mapping other than the oldest.
    pub out_of_order: u64,
    /// Peak number of older live mappings at such an unmap.
    pub overtaken_max: u64,
    /// Sum of these numbers over all unmaps.
    pub overtaken_sum: u64,
    /// Unmaps of the slot after the previously unmapped one, for which a prefetched next entry
    /// would have been right.
    pub next_in_turn: u64,
    /// Live mappings at the end of the trace.
    pub live_at_end: u64,
    live: u64,
    withheld: u64,
    burst: Vec<(u16, u64)>,
    bursts: Bursts<(u64, u32)>,
    /// Ordinal of the oldest slot that is not free again. `free_again` has a flag for it and for
    /// each newer slot.
    oldest: u64,
    free_again: VecDeque<bool>,
    /// Ordinals of the first slots of live mappings, ascending.
    alive: Ranks,
    /// Ordinal of the slot after the last unmapped one.
    next: u64,
}

impl RingDemand {
    /// Returns the ordinal of the mapping's first slot.
    fn map(&mut self, count: u32) -> u64 {
        let first = self.oldest + self.free_again.len() as u64;
        self.maps += 1;
        self.slots += u64::from(count);
        self.live += u64::from(count);
        for _ in 0..count {
            self.free_again.push_back(false);
        }
        self.alive.push(first);
        self.live_max = self.live_max.max(self.live);
        self.mappings_max = self.mappings_max.max(self.alive.len() as u64);
        self.pieces_max = self.pieces_max.max(u64::from(count));
        self.any_order_need = self.any_order_need.max(self.live + self.withheld);
        self.in_order_need = self.in_order_need.max(self.free_again.len() as u64);
        first
    }

    fn unmap(&mut self, cpu: u16, first: u64, count: u32) {
        self.unmaps += 1;
        self.live -= u64::from(count);
        if let Some(rank) = self.alive.remove(first) {
            self.out_of_order += u64::from(rank > 0);
            self.overtaken_sum += rank as u64;
            self.overtaken_max = self.overtaken_max.max(rank as u64);
        }
        self.next_in_turn += u64::from(first == self.next);
        self.next = first + u64::from(count);
        match self.burst.iter_mut().find(|(of, _)| *of == cpu) {
            Some((_, slots)) => *slots += u64::from(count),
            None => self.burst.push((cpu, u64::from(count))),
        }
        let longest = self.burst.iter().map(|(_, slots)| *slots).max();
        self.burst_max = self.burst_max.max(longest.unwrap_or(0));
        for part in self.bursts.withhold(cpu, (first, count)) {
            self.release(part);
        }
        self.withheld += u64::from(count);
        self.withheld_max = self.withheld_max.max(self.withheld);
    }

    fn end_burst(&mut self, cpu: u16) {
        self.burst.retain(|(of, _)| *of != cpu);
        for item in self.bursts.end(cpu) {
            self.release(item);
        }
    }

    fn release(&mut self, (first, count): (u64, u32)) {
        self.withheld -= u64::from(count);
        for slot in first..first + u64::from(count) {
            if let Some(free) = self.free_again.get_mut((slot - self.oldest) as usize) {
                *free = true;
            }
        }
        while self.free_again.front() == Some(&true) {
            self.free_again.pop_front();
            self.oldest += 1;
        }
    }

    /// Returns the share of unmaps of a mapping other than the oldest.
    pub fn out_of_order_share(&self) -> f64 {
        self.out_of_order as f64 / self.unmaps.max(1) as f64
    }

    /// Returns the N that suffices for any order: L + B. The rIOMMU paper requires N >= L; B is the
    /// cost of safety.
    pub fn rule(&self) -> u64 {
        self.live_max + self.withheld_max
    }

    /// Returns N by the rIOMMU paper's other rule, D x K, plus B.
    pub fn descriptor_rule(&self) -> u64 {
        let all = self.mappings_max.saturating_mul(self.pieces_max);
        all.saturating_add(self.withheld_max)
    }
}

/// Demand on each ring of a trace.
#[derive(Debug, Clone, Default)]
pub struct TraceDemand {
    devices: Vec<[RingDemand; RINGS]>,
    names: Vec<String>,
    mappings: Vec<Option<(DeviceIndex, Direction, u64, u32)>>,
    cpus: u64,
    /// Trace lines that the steps cover.
    pub lines: u64,
}

impl TraceDemand {
    /// Adds the steps of `plan`.
    pub fn add(&mut self, plan: &Plan) {
        self.lines += plan.lines;
        for timed in &plan.steps {
            match timed.step {
                Step::Map {
                    id,
                    device,
                    cpu,
                    direction,
                    count,
                    ..
                } => {
                    self.cpus = self.cpus.max(u64::from(cpu) + 1);
                    let first = self.ring(device, direction).map(count);
                    if self.mappings.len() <= id.index() {
                        self.mappings.resize(id.index() + 1, None);
                    }
                    self.mappings[id.index()] = Some((device, direction, first, count));
                }
                Step::Unmap { id, cpu, .. } => {
                    let mappings = self.mappings.get_mut(id.index()).and_then(Option::take);
                    if let Some((device, direction, first, count)) = mappings {
                        self.ring(device, direction).unmap(cpu, first, count);
                    }
                }
                Step::EndBurst {
                    device,
                    cpu,
                    direction,
                } => self.ring(device, direction).end_burst(cpu),
                Step::Doorbell { .. } | Step::EndDescriptor { .. } | Step::Tick => {}
            }
        }
    }

    /// Ends the count.
    pub fn finish(&mut self, devices: &Devices) {
        self.names = devices
            .iter()
            .map(|(_, device)| device.name.clone())
            .collect();
        for ring in self.devices.iter_mut().flatten() {
            ring.live_at_end = ring.alive.len() as u64;
        }
    }

    /// Returns the approximate maximum memory of one replay in bytes: state of mapped segments, and
    /// of each (device, CPU) pair.
    pub(super) fn replay_bytes(&self) -> u64 {
        const BASE: u64 = 2 << 20;
        const OF_A_SEGMENT: u64 = 640;
        const OF_A_PAIR: u64 = 13 << 10;
        let segments: u64 = self
            .devices
            .iter()
            .flatten()
            .map(|ring| ring.live_max)
            .sum();
        let pairs = self.cpus * self.devices.len() as u64;
        BASE + OF_A_SEGMENT * segments + OF_A_PAIR * pairs
    }

    fn ring(&mut self, device: DeviceIndex, direction: Direction) -> &mut RingDemand {
        if self.devices.len() <= device.index() {
            self.devices
                .resize_with(device.index() + 1, Default::default);
        }
        &mut self.devices[device.index()][ring_index(direction)]
    }

    /// Returns the rings in use, with the names of their devices.
    pub fn rings(&self) -> impl Iterator<Item = (DeviceIndex, &str, Direction, &RingDemand)> {
        let devices = (0..).map(DeviceIndex).zip(&self.devices);
        devices.flat_map(|(device, rings)| {
            let name = self.names.get(device.index()).map_or("", String::as_str);
            Direction::ALL
                .into_iter()
                .map(move |direction| (device, name, direction, &rings[ring_index(direction)]))
                .filter(|(.., ring)| ring.maps > 0)
        })
    }
}

/// Reads a trace to its end and counts the operations of `devices`, or of all devices. Calls
/// `progress` with the number of lines so far.
///
/// # Errors
/// The trace is malformed or exceeds a limit.
pub fn measure_demand<R: Read>(
    mut operations: Operations<R>,
    devices: Option<&[String]>,
    limits: ReplayLimits,
    mut progress: impl FnMut(u64),
) -> Result<TraceDemand, LabError> {
    let mut usage = TraceDemand::default();
    each_plan(
        &mut operations,
        &mut Planner::new().with_limits(limits),
        devices,
        |_, plan, _| {
            usage.add(plan);
            progress(usage.lines);
            Ok(())
        },
    )?;
    usage.finish(operations.devices());
    Ok(usage)
}
