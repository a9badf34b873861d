//! A chunk of a trace as the replay performs it: what every mode does alike is decided here once,
//! before any mode runs.
//!
//! Beside maps and unmaps a plan says where bursts end. A burst is a run of unmaps of one (device,
//! direction, CPU); it ends at any other event of that key, 50 us after its first unmap, or before
//! a map of a page that it still withholds (decision 0005).
//!
//! If asked, it says too where doorbells are: after each run of maps of one (device, direction,
//! CPU), which any other operation or tick ends (decision 0012).

mod pass;
mod withheld;

use std::cmp::Reverse;

use ringfence_pviommu::rtc::Cycles;
use ringfence_trace::{Chunk, DeviceIndex, Devices, MappingId, Op, OpKind};
use ringfence_types::{Direction, Nanos, PageSize, PhysRange};

pub use pass::each_plan;
use withheld::{PageRun, Withheld};

use crate::error::LabError;
use crate::guest::RtcParams;
use crate::limits::ReplayLimits;

/// How long a burst may last on the trace's clock.
pub const BURST_NS: u64 = 50_000;

/// How often timers are looked at on the trace's clock: a jiffy.
const TICK_NS: u64 = 1_000_000;

/// How long timers are looked at while nothing happens: no timer of a policy runs longer.
const QUIET_NS: u64 = 12_000_000;

/// Most bursts that are open at once, each of a device, direction and CPU. A machine has few
/// within the 50 us that a burst lasts; a trace whose clock stands still could open any number,
/// and each operation looks for its own among them.
const MAX_OPEN_BURSTS: usize = 1024;

/// Most ends of cycles behind [`QUIET_NS`] of quiet, for each length of a cycle. A cache keeps a
/// mapping for C cycles, C is at most 254, so all that it kept has left at the last of 256.
const MAX_IDLE_CYCLES: u64 = 256;

/// Ends of cycles after which a cache of C cycles has let go of all that nobody uses. The literal
/// one gives a mapping that was used again a second round of C + 1.
fn idle_cycle_ends(cycles: Cycles) -> u64 {
    MAX_IDLE_CYCLES.min(2 * (u64::from(cycles.get()) + 1))
}

/// Steps behind which a plan ends: a chunk of long gaps has many more steps than operations.
const MAX_STEPS: usize = 64 * 1024;

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Map `segments[first..first + count]`.
    Map {
        /// Slot of the mapping.
        id: MappingId,
        /// Whose.
        device: DeviceIndex,
        /// On which processor.
        cpu: u16,
        /// Direction.
        direction: Direction,
        /// First segment in [`Plan::segments`].
        first: u32,
        /// Number of segments.
        count: u32,
    },
    /// Unmap.
    Unmap {
        /// Slot of the mapping.
        id: MappingId,
        /// Whose.
        device: DeviceIndex,
        /// On which processor.
        cpu: u16,
        /// Direction.
        direction: Direction,
    },
    /// The device is told of a run of maps.
    Doorbell {
        /// Whose.
        device: DeviceIndex,
        /// On which processor.
        cpu: u16,
        /// Of which direction.
        direction: Direction,
    },
    /// A burst ends.
    EndBurst {
        /// Whose.
        device: DeviceIndex,
        /// On which processor.
        cpu: u16,
        /// Of which direction.
        direction: Direction,
    },
    /// Time has passed: timers may be due.
    Tick,
}

/// A step and its time.
#[derive(Debug, Clone, Copy)]
pub struct TimedStep {
    /// On the trace's clock.
    pub time: Nanos,
    /// What to do.
    pub step: Step,
}

/// The steps of one chunk.
#[derive(Debug, Default)]
pub struct Plan {
    /// In order.
    pub steps: Vec<TimedStep>,
    /// What the maps refer to.
    pub segments: Vec<PhysRange>,
    /// Maps among the steps.
    pub maps: u64,
    /// Unmaps among the steps.
    pub unmaps: u64,
    /// Lines of the trace that the steps stand for.
    pub lines: u64,
    /// Times of the ticks at which cycles end and nothing else is due, in order.
    pub quiet: Vec<Nanos>,
}

impl Plan {
    /// The segments of a map.
    #[inline]
    pub fn segments(&self, first: u32, count: u32) -> &[PhysRange] {
        let first = first as usize;
        self.segments
            .get(first..first + count as usize)
            .unwrap_or(&[])
    }
}

type Key = (DeviceIndex, u16, Direction);

#[derive(Debug, Clone)]
struct OpenBurst {
    key: Key,
    since: Nanos,
    runs: Vec<PageRun>,
    withheld: Withheld,
}

/// Turns chunks into plans. Remembers what is live and which bursts are open between chunks.
#[derive(Debug)]
pub struct Planner {
    /// Device and direction of each live mapping, by slot.
    live: Vec<Option<(DeviceIndex, Direction)>>,
    /// Processors in order of appearance: the rows of per-CPU state.
    cpus: Vec<u16>,
    /// Segments of live mappings, by slot, for the pages that a burst withholds.
    pages: Vec<Vec<PhysRange>>,
    /// Oldest first.
    open: Vec<OpenBurst>,
    withheld: Withheld,
    ticked: Nanos,
    /// Time of the operation before the last.
    last: Nanos,
    now: Nanos,
    /// No operation so far.
    first: bool,
    /// Bursts ended because a withheld page was mapped again.
    pub bursts_cut_by_map: u64,
    /// Bursts.
    pub bursts: u64,
    live_pages: u64,
    /// Most pages mapped at once, counted once for each mapping.
    pub live_pages_max: u64,
    /// Whether doorbells are wanted, and the run of maps that has none yet.
    doorbells: bool,
    rings: Option<Key>,
    /// Cycles, at whose ends timers are looked at whatever happens.
    cycles: Vec<RtcParams>,
    /// Operations planned, and the ends of cycles in the caches of all devices while there was
    /// none.
    operations: u64,
    cycle_ends: u64,
    /// Devices to keep; none means all.
    only: Option<Vec<DeviceIndex>>,
    limits: ReplayLimits,
    /// By device: whether it has mapped memory.
    seen: Vec<bool>,
    devices: usize,
}

impl Default for Planner {
    fn default() -> Self {
        Self::new()
    }
}

impl Planner {
    /// A planner for all devices of a trace.
    pub fn new() -> Self {
        Self {
            live: Vec::new(),
            cpus: Vec::new(),
            pages: Vec::new(),
            open: Vec::new(),
            withheld: Withheld::default(),
            ticked: Nanos(0),
            last: Nanos(0),
            now: Nanos(0),
            first: true,
            bursts_cut_by_map: 0,
            bursts: 0,
            live_pages: 0,
            live_pages_max: 0,
            doorbells: false,
            rings: None,
            cycles: Vec::new(),
            operations: 0,
            cycle_ends: 0,
            only: None,
            limits: ReplayLimits::default(),
            seen: Vec::new(),
            devices: 0,
        }
    }

    /// Refuses, from now on, traces beyond `limits`.
    pub fn with_limits(mut self, limits: ReplayLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Says from now on where devices are told of maps.
    pub fn with_doorbells(mut self) -> Self {
        self.doorbells = true;
        self
    }

    /// Looks at timers, from now on, at each end of these cycles too, until a cache that has them
    /// is empty.
    pub fn with_cycles(mut self, cycles: impl IntoIterator<Item = RtcParams>) -> Self {
        let cycles = cycles.into_iter().filter(|cycling| cycling.cycle_ns > 0);
        self.cycles.extend(cycles);
        // Of one length the one that keeps longest.
        self.cycles
            .sort_unstable_by_key(|cycling| (cycling.cycle_ns, Reverse(cycling.cycles)));
        self.cycles.dedup_by_key(|cycling| cycling.cycle_ns);
        self
    }

    /// Skips, from now on, the operations of devices that are not called one of `names`.
    pub fn only_devices(&mut self, devices: &Devices, names: &[String]) {
        self.only = Some(names.iter().filter_map(|name| devices.find(name)).collect());
    }

    /// Whether operations of `device` are planned.
    pub fn keeps(&self, device: DeviceIndex) -> bool {
        self.only.as_ref().is_none_or(|only| only.contains(&device))
    }

    /// Mappings that are alive, and whose.
    pub fn live_mappings(&self) -> Vec<(MappingId, DeviceIndex)> {
        let ids = (0..).map(MappingId);
        ids.zip(&self.live)
            .filter_map(|(id, live)| live.map(|(device, _)| (id, device)))
            .collect()
    }

    /// Whether `device`, which maps memory, is one of as many as may.
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

    /// Plans the operations of `chunk` into `plan`, whose memory is reused.
    ///
    /// # Errors
    /// More devices map memory than may.
    pub fn plan(&mut self, chunk: &Chunk, plan: &mut Plan) -> Result<(), LabError> {
        self.plan_part(chunk, 0, usize::MAX, plan).map(drop)
    }

    /// The same from operation `first` on, until there are `most` steps or more; returns the
    /// operation to go on with.
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
            self.step(chunk, op, plan);
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

    fn step(&mut self, chunk: &Chunk, op: &Op, plan: &mut Plan) {
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
                let pieces = chunk.segments_of(segments);
                if pieces.is_empty() {
                    return;
                }
                self.end((op.device, cpu, direction), time, plan);
                self.end_withholding(pieces, time, plan);
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
            }
            OpKind::Unmap { id } => {
                let slot = id.index();
                let Some((_, direction)) = self.live.get_mut(slot).and_then(Option::take) else {
                    return;
                };
                let gone = pages_of(&self.pages[slot]);
                self.live_pages = self.live_pages.saturating_sub(gone);
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
                if self.open.len() >= MAX_OPEN_BURSTS
                    && self.open.iter().all(|open| open.key != key)
                {
                    let oldest = self.open[0].key;
                    self.end(oldest, time, plan);
                }
                self.withhold(key, slot, time);
            }
        }
    }

    /// Ends all bursts and lets all timers run out, at the end of the trace.
    pub fn finish(&mut self, plan: &mut Plan) {
        self.last = self.now;
        let time = Nanos(self.now.0.saturating_add(QUIET_NS));
        self.tick_until(time, plan);
        self.now = time;
        while let Some(open) = self.open.first() {
            let key = open.key;
            self.end(key, time, plan);
        }
    }

    /// Lets the clock run to `time`, burst ends and ticks in order.
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
                // Nothing can be pending but what cycles end: the clock jumps.
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

    /// The first end of a cycle from `due` on, as far as one can matter behind `quiet`.
    fn next_cycle(&self, due: Nanos, quiet: Nanos) -> Option<Nanos> {
        let ends = self.cycles.iter().filter_map(|cycling| {
            let ns = cycling.cycle_ns;
            let end = due.0.div_ceil(ns).saturating_mul(ns);
            (end.saturating_sub(quiet.0) / ns < idle_cycle_ends(cycling.cycles)).then_some(end)
        });
        ends.min().map(Nanos)
    }

    /// The row of a processor. A trace that names more processors than there are rows shares the
    /// last one.
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

    fn withhold(&mut self, key: Key, slot: usize, time: Nanos) {
        let index = match self.open.iter().position(|open| open.key == key) {
            Some(index) => index,
            None => {
                self.bursts += 1;
                self.open.push(OpenBurst {
                    key,
                    since: time,
                    runs: Vec::new(),
                    withheld: Withheld::default(),
                });
                self.open.len() - 1
            }
        };
        for piece in &self.pages[slot] {
            let run = PageRun::of(piece);
            self.open[index].runs.push(run);
            self.open[index].withheld.add(run);
            self.withheld.add(run);
        }
    }

    fn end(&mut self, key: Key, time: Nanos, plan: &mut Plan) {
        if let Some(index) = self.open.iter().position(|open| open.key == key) {
            let open = self.open.remove(index);
            for run in open.runs {
                self.withheld.remove(run);
            }
            let (device, cpu, direction) = key;
            plan.steps.push(TimedStep {
                time,
                step: Step::EndBurst {
                    device,
                    cpu,
                    direction,
                },
            });
        }
    }

    /// The device is told of the maps that it has not been told of.
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
        while let Some(oldest) = self.open.first()
            && time.since(oldest.since) >= BURST_NS
        {
            let (key, due) = (oldest.key, Nanos(oldest.since.0 + BURST_NS));
            self.end(key, due, plan);
        }
    }

    fn end_withholding(&mut self, pieces: &[PhysRange], time: Nanos, plan: &mut Plan) {
        if self.open.is_empty() {
            return;
        }
        for piece in pieces {
            let wanted = PageRun::of(piece);
            while self.withheld.any(&wanted) {
                let holds = |open: &&OpenBurst| open.withheld.any(&wanted);
                let Some(open) = self.open.iter().find(holds) else {
                    break;
                };
                let key = open.key;
                self.bursts_cut_by_map += 1;
                self.end(key, time, plan);
            }
        }
    }
}

/// Pages that the entries of a table for `pieces` would be.
fn pages_of(pieces: &[PhysRange]) -> u64 {
    let pages = pieces.iter().map(|piece| piece.pages(PageSize::Size4K));
    pages.fold(0, u64::saturating_add)
}
