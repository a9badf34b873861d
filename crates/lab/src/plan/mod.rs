//! The steps of a trace chunk that are common to all modes. The planner decides them once, before
//! any mode runs.
//!
//! Besides maps and unmaps, a plan contains the ends of bursts. A burst is a run of unmaps of one
//! (device, direction, CPU). It ends at any other event of that key, 50 us after its first unmap,
//! or before a map of a page that it still withholds (decision 0005).
//!
//! On request, a plan also contains doorbells. A doorbell follows each run of maps of one (device,
//! direction, CPU); any other operation or tick ends the run (decision 0012). Also on request, it
//! contains the ends of descriptors, for modes whose bursts span maps (decision 0037).

mod bursts;
mod frames;
mod pass;
mod withheld;

use std::cmp::Reverse;

use ringfence_pviommu::rtc::Cycles;
use ringfence_trace::{Chunk, DeviceIndex, Devices, MappingId, Op, OpKind};
use ringfence_types::{Direction, Nanos, PageSize, PhysRange};

use bursts::{Bursts, Key, Rule};
use frames::ContiguousFrames;

pub use crate::withholds::Withholds;
pub use bursts::{DESCRIPTOR_PAGES, RECEIVE_DESCRIPTOR_NS, TRANSMIT_DESCRIPTOR_NS};
pub use pass::each_plan;
pub(crate) use pass::each_plan_with;

use crate::error::LabError;
use crate::limits::ReplayLimits;
use crate::mapping_cache::CycleParams;

/// Longest duration of a burst on the trace's clock.
pub const BURST_NS: u64 = 50_000;

/// Interval between timer ticks on the trace's clock: a jiffy.
const TICK_NS: u64 = 1_000_000;

/// Time for which ticks continue after the last operation. Flush queues time out after 10 ms; the
/// planner adds the ends of cache cycles separately.
const QUIET_NS: u64 = 12_000_000;

/// Returns the number of cycle ends, after [`QUIET_NS`] without an operation, after which a cache
/// of C cycles has dropped all unused mappings: 510 at most. The cache as published keeps a reused
/// mapping for a second round of C + 1.
fn idle_cycle_ends(cycles: Cycles) -> u64 {
    2 * (u64::from(cycles.get()) + 1)
}

/// Number of steps after which a plan ends at the next operation. A chunk with long gaps has many
/// more steps than operations.
const MAX_STEPS: usize = 64 * 1024;

/// One step of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Map `segments[first..first + count]`.
    Map {
        /// Slot of the mapping.
        id: MappingId,
        /// Device that maps.
        device: DeviceIndex,
        /// Index of the CPU.
        cpu: u16,
        /// Direction of the DMA.
        direction: Direction,
        /// First segment in [`Plan::segments`].
        first: u32,
        /// Number of segments.
        count: u32,
    },
    /// Unmap the mapping `id`.
    Unmap {
        /// Slot of the mapping.
        id: MappingId,
        /// Device that unmaps.
        device: DeviceIndex,
        /// Index of the CPU.
        cpu: u16,
        /// Direction of the DMA.
        direction: Direction,
    },
    /// Ring the device's doorbell after a run of maps.
    Doorbell {
        /// Device of the maps.
        device: DeviceIndex,
        /// Index of the CPU.
        cpu: u16,
        /// Direction of the maps.
        direction: Direction,
    },
    /// End the burst of a (device, CPU, direction).
    EndBurst {
        /// Device of the burst.
        device: DeviceIndex,
        /// Index of the CPU.
        cpu: u16,
        /// Direction of the burst.
        direction: Direction,
    },
    /// End the descriptor of a (device, CPU, direction).
    EndDescriptor {
        /// Device of the descriptor.
        device: DeviceIndex,
        /// Index of the CPU.
        cpu: u16,
        /// Direction of the descriptor.
        direction: Direction,
        /// Buffers that the descriptor withholds. It ends only in modes that withhold the same.
        of: Withholds,
    },
    /// Check timers: some may be due.
    Tick,
}

/// A step and its time.
#[derive(Debug, Clone, Copy)]
pub struct TimedStep {
    /// Time on the trace's clock.
    pub time: Nanos,
    /// Step that the replay performs at that time.
    pub step: Step,
}

/// The steps of one chunk.
#[derive(Debug, Default)]
pub struct Plan {
    /// Steps in order of time.
    pub steps: Vec<TimedStep>,
    /// Segments that the maps refer to.
    pub segments: Vec<PhysRange>,
    /// Number of maps among the steps.
    pub maps: u64,
    /// Number of unmaps among the steps.
    pub unmaps: u64,
    /// Trace lines that the steps cover.
    pub lines: u64,
    /// Times of the ticks that only a cycle end requires, in order.
    pub quiet: Vec<Nanos>,
}

impl Plan {
    /// Returns the segments of a map.
    #[inline]
    pub fn segments(&self, first: u32, count: u32) -> &[PhysRange] {
        let first = first as usize;
        self.segments
            .get(first..first + count as usize)
            .unwrap_or(&[])
    }
}

/// Turns chunks into plans. Keeps live mappings and open bursts across chunks.
#[derive(Debug)]
pub struct Planner {
    /// Device and direction of each live mapping, by slot.
    live: Vec<Option<(DeviceIndex, Direction)>>,
    /// CPUs in order of appearance. The position is the index of the per-CPU state.
    cpus: Vec<u16>,
    /// Segments of live mappings by slot, for the pages that a burst withholds.
    pages: Vec<Vec<PhysRange>>,
    bursts: Bursts,
    descriptors: Vec<Bursts>,
    ticked: Nanos,
    /// Time of the previous operation.
    last: Nanos,
    now: Nanos,
    /// True before the first operation.
    first: bool,
    live_pages: u64,
    /// Peak number of mapped pages. A page counts once for each mapping.
    pub live_pages_max: u64,
    /// True if plans contain doorbells. `rings` is the run of maps without a doorbell so far.
    doorbells: bool,
    rings: Option<Key>,
    /// Cycle parameters of the caches. Timers tick at the end of each cycle.
    cycles: Vec<CycleParams>,
    /// Planned operations, and cycle ends in the caches of all devices during quiet time.
    operations: u64,
    cycle_ends: u64,
    /// Devices to plan; `None` for all.
    only: Option<Vec<DeviceIndex>>,
    limits: ReplayLimits,
    /// The frames of buffers; `None` for those of the trace.
    frames: Option<ContiguousFrames>,
    /// By device: true if it has mapped memory.
    seen: Vec<bool>,
    devices: usize,
}

impl Default for Planner {
    fn default() -> Self {
        Self::new()
    }
}

impl Planner {
    /// Returns a planner for all devices of a trace.
    pub fn new() -> Self {
        Self {
            live: Vec::new(),
            cpus: Vec::new(),
            pages: Vec::new(),
            bursts: Bursts::new(Rule::Burst),
            descriptors: Vec::new(),
            ticked: Nanos(0),
            last: Nanos(0),
            now: Nanos(0),
            first: true,
            live_pages: 0,
            live_pages_max: 0,
            doorbells: false,
            rings: None,
            cycles: Vec::new(),
            operations: 0,
            cycle_ends: 0,
            only: None,
            limits: ReplayLimits::default(),
            frames: None,
            seen: Vec::new(),
            devices: 0,
        }
    }

    /// Enforces `limits` from now on.
    pub fn with_limits(mut self, limits: ReplayLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Moves large buffers to contiguous frames from now on.
    pub fn with_contiguous_frames(mut self) -> Self {
        self.frames = Some(ContiguousFrames::new());
        self
    }

    /// Plans doorbells from now on.
    pub fn with_doorbells(mut self) -> Self {
        self.doorbells = true;
        self
    }

    /// Plans the ends of descriptors that withhold all buffers, from now on.
    pub fn with_descriptors(self) -> Self {
        self.with_descriptors_of(Withholds::All)
    }

    /// Plans the ends of descriptors that withhold the buffers `of`, from now on.
    pub fn with_descriptors_of(mut self, of: Withholds) -> Self {
        let rule = Rule::Descriptor(of);
        if self.descriptors.iter().all(|bursts| bursts.rule != rule) {
            self.descriptors.push(Bursts::new(rule));
        }
        self
    }

    /// Returns the number of bursts.
    pub fn bursts(&self) -> u64 {
        self.bursts.count
    }

    /// Returns the number of bursts that ended because a withheld page was mapped again.
    pub fn bursts_cut_by_map(&self) -> u64 {
        self.bursts.cut_by_map
    }

    /// Returns the number of descriptors of the kind that was requested first, and of those that
    /// ended because a part of a withheld buffer was mapped again.
    pub fn descriptors(&self) -> (u64, u64) {
        let planned = self.descriptors.first();
        planned.map_or((0, 0), |descriptors| {
            (descriptors.count, descriptors.cut_by_map)
        })
    }

    /// Also plans a tick at each end of these cycles from now on, until a cache with these cycles
    /// is empty.
    pub fn with_cycles(mut self, cycles: impl IntoIterator<Item = CycleParams>) -> Self {
        let cycles = cycles.into_iter().filter(|cycling| cycling.cycle_ns > 0);
        self.cycles.extend(cycles);
        // Of several entries with the same length, keep the one with the most cycles.
        self.cycles
            .sort_unstable_by_key(|cycling| (cycling.cycle_ns, Reverse(cycling.cycles)));
        self.cycles.dedup_by_key(|cycling| cycling.cycle_ns);
        self
    }

    /// From now on, plans only the operations of the devices in `names`.
    pub fn only_devices(&mut self, devices: &Devices, names: &[String]) {
        self.only = Some(names.iter().filter_map(|name| devices.find(name)).collect());
    }

    /// Returns true if the planner plans operations of `device`.
    pub fn keeps(&self, device: DeviceIndex) -> bool {
        self.only.as_ref().is_none_or(|only| only.contains(&device))
    }

    /// Returns the live mappings and their devices.
    pub fn live_mappings(&self) -> Vec<(MappingId, DeviceIndex)> {
        let ids = (0..).map(MappingId);
        ids.zip(&self.live)
            .filter_map(|(id, live)| live.map(|(device, _)| (id, device)))
            .collect()
    }

    /// Counts `device` as one that maps memory. Returns false above the limit on devices.
    fn admit(&mut self, device: DeviceIndex) -> bool {
        let index = device.index();
        if self.seen.len() <= index {
            self.seen.resize(index + 1, false);
        }
        if !std::mem::replace(&mut self.seen[index], true) {
            self.devices += 1;
        }
        self.devices <= self.limits.devices
    }

    /// Plans the operations of `chunk` into `plan`, and reuses its memory.
    ///
    /// # Errors
    /// The trace exceeds a limit on devices, CPUs or cycle ends.
    pub fn plan(&mut self, chunk: &Chunk, plan: &mut Plan) -> Result<(), LabError> {
        self.plan_part(chunk, 0, usize::MAX, plan).map(drop)
    }

    /// Plans from operation `first` on, until the plan has at least `most` steps. Returns the index
    /// of the next operation.
    fn plan_part(
        &mut self,
        chunk: &Chunk,
        first: usize,
        most: usize,
        plan: &mut Plan,
    ) -> Result<usize, LabError> {
        plan.steps.clear();
        plan.quiet.clear();
        plan.segments.clear();
        plan.maps = 0;
        plan.unmaps = 0;
        plan.lines = 0;
        for (index, op) in chunk.ops.iter().enumerate().skip(first) {
            if plan.steps.len() >= most {
                return Ok(index);
            }
            if !self.keeps(op.device) {
                continue;
            }
            plan.lines += u64::from(op.lines);
            if matches!(op.kind, OpKind::Map { .. }) && !self.admit(op.device) {
                let limit = self.limits.devices;
                return Err(LabError::DeviceLimit { limit });
            }
            if self.first {
                self.first = false;
                self.ticked = op.time;
            }
            self.last = self.now;
            self.now = self.now.max(op.time);
            self.step(chunk, op, plan)?;
            self.operations += 1;
            let limit = self.limits.device_cpus;
            if self.devices.saturating_mul(self.cpus.len()) > limit {
                return Err(LabError::DeviceCpus { limit });
            }
            let limit = self.limits.cycle_ends_of(self.operations);
            if self.cycle_ends > limit {
                return Err(LabError::CycleEnds { limit });
            }
        }
        Ok(chunk.ops.len())
    }

    fn step(&mut self, chunk: &Chunk, op: &Op, plan: &mut Plan) -> Result<(), LabError> {
        let time = self.now;
        let cpu = self.cpu_index(op.cpu);
        let maps = match op.kind {
            OpKind::Map { direction, .. } => Some((op.device, cpu, direction)),
            OpKind::Unmap { .. } => None,
        };
        if maps != self.rings {
            self.ring_doorbell(plan);
        }
        self.tick_until(time, plan);
        self.expire(time, plan);
        match op.kind {
            OpKind::Map {
                id,
                direction,
                segments,
                ..
            } => {
                let recorded = chunk.segments_of(segments);
                if recorded.is_empty() {
                    return Ok(());
                }
                let mut frames = self.frames.take();
                let pieces = match &mut frames {
                    Some(frames) => frames.assign(recorded)?,
                    None => recorded,
                };
                let key = (op.device, cpu, direction);
                for bursts in self.withholding() {
                    bursts.map(key, pieces, time, plan);
                }
                let first = plan.segments.len() as u32;
                plan.segments.extend_from_slice(pieces);
                let slot = id.index();
                if self.live.len() <= slot {
                    self.live.resize(slot + 1, None);
                    self.pages.resize_with(slot + 1, Vec::new);
                }
                self.live[slot] = Some((op.device, direction));
                if self.doorbells {
                    self.rings = Some((op.device, cpu, direction));
                }
                self.pages[slot].clear();
                self.pages[slot].extend_from_slice(pieces);
                self.live_pages = self.live_pages.saturating_add(pages_of(pieces));
                self.live_pages_max = self.live_pages_max.max(self.live_pages);
                plan.maps += 1;
                plan.steps.push(TimedStep {
                    time,
                    step: Step::Map {
                        id,
                        device: op.device,
                        cpu,
                        direction,
                        first,
                        count: pieces.len() as u32,
                    },
                });
                self.frames = frames;
            }
            OpKind::Unmap { id } => {
                let slot = id.index();
                let Some((_, direction)) = self.live.get_mut(slot).and_then(Option::take) else {
                    return Ok(());
                };
                let unmapped = pages_of(&self.pages[slot]);
                self.live_pages = self.live_pages.saturating_sub(unmapped);
                plan.unmaps += 1;
                plan.steps.push(TimedStep {
                    time,
                    step: Step::Unmap {
                        id,
                        device: op.device,
                        cpu,
                        direction,
                    },
                });
                let key = (op.device, cpu, direction);
                for bursts in self.descriptors.iter_mut().chain([&mut self.bursts]) {
                    bursts.unmap(key, &self.pages[slot], time, plan);
                }
            }
        }
        Ok(())
    }

    /// Ends all bursts and lets all timers expire, at the end of the trace.
    pub fn finish(&mut self, plan: &mut Plan) {
        self.last = self.now;
        let time = Nanos(self.now.0.saturating_add(QUIET_NS));
        self.tick_until(time, plan);
        self.now = time;
        for bursts in self.withholding() {
            bursts.end_all(time, plan);
        }
    }

    /// Advances the clock to `time` and emits burst ends and ticks in order.
    fn tick_until(&mut self, time: Nanos, plan: &mut Plan) {
        let quiet = Nanos(self.last.0.saturating_add(QUIET_NS));
        while time.since(self.ticked) >= TICK_NS {
            let due = Nanos(self.ticked.0 + TICK_NS);
            self.ticked = due;
            self.ring_doorbell(plan);
            if due <= quiet {
                self.expire(due, plan);
                plan.steps.push(TimedStep {
                    time: due,
                    step: Step::Tick,
                });
            } else {
                // Only cycle ends can be pending: skip to the next one.
                self.ticked = match self.next_cycle(due, quiet) {
                    Some(end) if end <= time => {
                        plan.steps.push(TimedStep {
                            time: end,
                            step: Step::Tick,
                        });
                        plan.quiet.push(end);
                        self.cycle_ends += self.devices as u64;
                        end
                    }
                    _ => time,
                };
            }
        }
    }

    /// Returns the first cycle end at or after `due` at which a cache can still hold mappings.
    /// Quiet time began at `quiet`.
    fn next_cycle(&self, due: Nanos, quiet: Nanos) -> Option<Nanos> {
        let ends = self.cycles.iter().filter_map(|cycling| {
            let ns = cycling.cycle_ns;
            let end = due.0.div_ceil(ns).saturating_mul(ns);
            (end.saturating_sub(quiet.0) / ns < idle_cycle_ends(cycling.cycles)).then_some(end)
        });
        ends.min().map(Nanos)
    }

    /// Returns the index of a CPU. CPUs beyond the last index share it.
    fn cpu_index(&mut self, cpu: u16) -> u16 {
        const ROWS: usize = 512;
        let found = self.cpus.iter().position(|known| *known == cpu);
        let row = found.unwrap_or_else(|| {
            if self.cpus.len() < ROWS {
                self.cpus.push(cpu);
            }
            self.cpus.len() - 1
        });
        row as u16
    }

    fn withholding(&mut self) -> impl Iterator<Item = &mut Bursts> {
        self.descriptors.iter_mut().chain([&mut self.bursts])
    }

    /// Plans a doorbell for the maps that have none yet.
    #[inline]
    fn ring_doorbell(&mut self, plan: &mut Plan) {
        if let Some((device, cpu, direction)) = self.rings.take() {
            plan.steps.push(TimedStep {
                time: self.last,
                step: Step::Doorbell {
                    device,
                    cpu,
                    direction,
                },
            });
        }
    }

    fn expire(&mut self, time: Nanos, plan: &mut Plan) {
        while let Some(due) = self.withholding().filter_map(|bursts| bursts.due()).min()
            && due <= time
        {
            for bursts in self.withholding() {
                bursts.end_due(due, plan);
            }
        }
    }
}

/// Returns the number of table entries for `pieces`.
fn pages_of(pieces: &[PhysRange]) -> u64 {
    let pages = pieces.iter().map(|piece| piece.pages(PageSize::Size4K));
    pages.fold(0, u64::saturating_add)
}
