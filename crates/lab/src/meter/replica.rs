//! One replay of the mapping layer alone, timed: no device, no oracle.

use std::hint::black_box;
use std::rc::Rc;

use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_dma::{
    AttachError, Attachment, Cpu, Dma, MapError, MapReason, Outcome, Platform, Segment, SgLimits,
    SgRequest,
};
use ringfence_memory::{Arena, Frames};
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{
    DeviceId, Direction, DomainId, Invalidator, Iova, Nanos, PfnRange, PhysRange,
};

use super::{Clock, Tape};
use crate::error::LabError;
use crate::plan::{Plan, Step, Timed};
use crate::replay::{Attached, Held, Newcomer, Stalled, Waiting};

/// The platform of a timed replay.
#[derive(Debug)]
pub struct Bench<I> {
    /// Memory for tables.
    pub arena: Rc<Arena>,
    /// Frames in it.
    pub frames: Frames<Rc<Arena>>,
    /// Invalidations.
    pub invalidator: I,
    /// The trace's time.
    pub now: Nanos,
}

impl<I: Invalidator> Platform for Bench<I> {
    type Memory = Arena;
    type Frames = Frames<Rc<Arena>>;
    type Invalidator = I;

    #[inline]
    fn memory(&self) -> &Arena {
        &self.arena
    }

    #[inline]
    fn frames(&self) -> &Frames<Rc<Arena>> {
        &self.frames
    }

    #[inline]
    fn invalidator(&mut self) -> &mut I {
        &mut self.invalidator
    }

    #[inline]
    fn now(&self) -> Nanos {
        self.now
    }
}

/// Steps that are timed together: long enough that reading the clock does not count, short enough that most are undisturbed by
/// other processes.
const BLOCK: usize = 1024;

/// A mapping layer on a platform of its own, driven by plans.
pub struct Replica<S: Space, F: Flush<S, u64>, I> {
    dma: Dma<S, F, u64>,
    cpus: Vec<Cpu<S, F, u64>>,
    attached: Vec<Option<Attached>>,
    held: Vec<Held>,
    stalled: Stalled,
    stalled_out: u64,
    segments: Vec<Segment>,
    /// The platform.
    pub platform: Bench<I>,
    refused: u64,
    first_refusal: Option<MapError>,
    #[allow(clippy::type_complexity)]
    make: Box<dyn FnMut(&Newcomer, &Bench<I>) -> Result<S, LabError>>,
}

impl<S: Space, F: Flush<S, u64>, I: Invalidator> Replica<S, F, I> {
    /// A layer without domains; `make` makes the space of each device when it first maps.
    pub fn new(
        flush: F,
        platform: Bench<I>,
        make: impl FnMut(&Newcomer, &Bench<I>) -> Result<S, LabError> + 'static,
    ) -> Self {
        Self {
            dma: Dma::new(flush),
            cpus: Vec::new(),
            attached: Vec::new(),
            held: Vec::new(),
            stalled: Stalled::default(),
            stalled_out: 0,
            segments: Vec::new(),
            platform,
            refused: 0,
            first_refusal: None,
            make: Box::new(make),
        }
    }

    /// Makes everything that the steps of `plan` need, so that the timed loop makes nothing.
    pub fn prepare(&mut self, plan: &Plan) -> Result<(), LabError> {
        self.provide(&Needs::of(plan))
    }

    /// The same for steps whose needs are known.
    pub(crate) fn provide(&mut self, needs: &Needs) -> Result<(), LabError> {
        make_room(
            needs,
            &mut self.held,
            &mut self.segments,
            &mut self.attached,
        )?;
        for &device in &needs.devices {
            if self.attached[device.index()].is_none() {
                self.attached[device.index()] = Some(self.attach(device)?);
            }
        }
        while self.cpus.len() < needs.cpus {
            self.cpus.push(self.dma.cpu());
        }
        Ok(())
    }

    fn attach(&mut self, device: DeviceIndex) -> Result<Attached, LabError> {
        let (platform, make) = (&self.platform, &mut self.make);
        let id = DeviceId::new(device.0);
        // Behind a pointer: replicas of equal spaces on different platforms share one copy of what calls it.
        let make: &mut dyn FnMut(DomainId) -> Result<S, LabError> = &mut |domain| {
            let newcomer = Newcomer {
                domain,
                device: id,
                row: device,
            };
            make(&newcomer, platform)
        };
        let at = self.dma.attach(id, Iova::new(u64::MAX), make);
        let at = at.map_err(|error| match error {
            AttachError::Space(error) => error,
            _ => LabError::TooManyDevices,
        })?;
        Ok(Attached::new(&self.dma, at))
    }

    /// Maps that the layer refused, and the first.
    pub fn refusals(&self) -> Option<(u64, MapError)> {
        self.first_refusal.map(|first| (self.refused, first))
    }

    /// Performs the steps of `plan` and tells `clock` of each. With a tape, notes the ranges that the maps got.
    pub fn run(&mut self, plan: &Plan, clock: &mut Clock, tape: Option<&Tape>) {
        for block in plan.steps.chunks(BLOCK) {
            clock.begin();
            self.run_block(plan, block, clock, tape);
            clock.end();
        }
    }

    #[inline]
    fn run_block(&mut self, plan: &Plan, block: &[Timed], clock: &mut Clock, tape: Option<&Tape>) {
        for timed in block {
            self.platform.now = timed.time;
            match timed.step {
                Step::Map {
                    id,
                    device,
                    cpu,
                    direction,
                    first,
                    count,
                } => {
                    clock.map();
                    let pieces = plan.segments(first, count);
                    if self.stalled.is_empty() || !self.stalled.queues(device, direction) {
                        let attempt = self.map(id, device, cpu, direction, pieces, tape);
                        if let Attempt::Settled = attempt {
                            continue;
                        }
                    }
                    let pieces = pieces.into();
                    self.stalled
                        .push(device, direction, Waiting { id, cpu, pieces });
                }
                Step::Unmap {
                    id,
                    device,
                    cpu,
                    direction,
                } => {
                    clock.unmap();
                    let (Some(Some(attached)), Some(own), Some(slot)) = (
                        self.attached.get(device.index()),
                        self.cpus.get_mut(usize::from(cpu)),
                        self.held.get_mut(id.index()),
                    ) else {
                        continue;
                    };
                    let at = attached.towards(direction);
                    let outcome = match core::mem::take(slot) {
                        Held::None => {
                            self.not_mapped(id, device, direction, tape);
                            continue;
                        }
                        Held::Single(mapping) => {
                            self.dma.unmap_single(own, &mut self.platform, at, mapping)
                        }
                        Held::List(mapping) => {
                            self.dma.unmap_sg(own, &mut self.platform, at, mapping)
                        }
                    };
                    let _ = black_box(outcome.ok().and_then(Outcome::into_buffer));
                    if !self.stalled.is_empty() {
                        self.retry(device, direction, tape);
                    }
                }
                Step::EndBurst {
                    device,
                    cpu,
                    direction,
                } => {
                    clock.unmap();
                    let (Some(Some(attached)), Some(own)) = (
                        self.attached.get(device.index()),
                        self.cpus.get_mut(usize::from(cpu)),
                    ) else {
                        continue;
                    };
                    let at = attached.towards(direction);
                    let _ = self
                        .dma
                        .end_burst(own, &mut self.platform, at, direction, keep);
                    if !self.stalled.is_empty() {
                        self.retry(device, direction, tape);
                    }
                }
                Step::Doorbell {
                    device,
                    cpu,
                    direction,
                } => {
                    // What it writes back belongs to the maps before it.
                    clock.map();
                    if let (Some(Some(attached)), Some(own)) = (
                        self.attached.get(device.index()),
                        self.cpus.get_mut(usize::from(cpu)),
                    ) {
                        let at = attached.towards(direction);
                        self.dma.doorbell(own, &mut self.platform, at);
                    }
                }
                Step::Tick => {
                    clock.unmap();
                    if let Some(own) = self.cpus.first_mut() {
                        let _ = self.dma.tick(own, &mut self.platform);
                    }
                }
            }
        }
    }
}

impl<S: Space, F: Flush<S, u64>, I: Invalidator> Replica<S, F, I> {
    #[inline(always)]
    fn map(
        &mut self,
        id: MappingId,
        device: DeviceIndex,
        cpu: u16,
        direction: Direction,
        pieces: &[PhysRange],
        tape: Option<&Tape>,
    ) -> Attempt {
        let (Some(Some(attached)), Some(own), Some(slot)) = (
            self.attached.get(device.index()),
            self.cpus.get_mut(usize::from(cpu)),
            self.held.get_mut(id.index()),
        ) else {
            return Attempt::Settled;
        };
        let at = attached.towards(direction);
        let buffer = u64::from(id.0);
        let held = if let [piece] = pieces {
            self.dma
                .map_single(own, &mut self.platform, at, buffer, *piece, direction)
                .map(|(mapping, _)| Held::Single(mapping))
        } else {
            let request = SgRequest {
                buffer,
                pieces,
                direction,
                limits: SgLimits::default(),
                out: &mut self.segments,
            };
            self.dma
                .map_sg(own, &mut self.platform, at, request)
                .map(|(mapping, _)| Held::List(mapping))
        };
        let held = match held {
            Ok(held) => held,
            Err((_, error)) => {
                if let Some(tape) = tape {
                    tape.record(None);
                }
                if matches!(error.reason, MapReason::RingFull(_)) {
                    return Attempt::Full;
                }
                self.refused += 1;
                self.first_refusal.get_or_insert(error);
                Held::None
            }
        };
        if let Some(tape) = tape {
            match &held {
                Held::None => {}
                Held::List(list) if !S::JOINS && list.range().is_none() => {
                    for segment in self.segments.iter().take(pieces.len()) {
                        tape.record(Some(PfnRange::covering(&segment.range)));
                    }
                }
                held => tape.record(reserved(&self.dma, at, held)),
            }
        }
        *slot = held;
        Attempt::Settled
    }

    /// The trace unmaps what is not mapped: its map was refused, or waits still.
    #[cold]
    fn not_mapped(
        &mut self,
        id: MappingId,
        device: DeviceIndex,
        direction: Direction,
        tape: Option<&Tape>,
    ) {
        if S::FILLS_UP && self.stalled.give_up(device, direction, id) {
            self.stalled_out += 1;
            self.retry(device, direction, tape);
        }
    }

    /// Maps what waits for a ring, in order, as far as there are slots.
    #[cold]
    fn retry(&mut self, device: DeviceIndex, direction: Direction, tape: Option<&Tape>) {
        // Elsewhere nothing ever waits: no need for one more copy of all that maps.
        if !S::FILLS_UP {
            return;
        }
        while let Some(first) = self.stalled.pop(device, direction) {
            let Waiting { id, cpu, pieces } = &first;
            if let Attempt::Full = self.map(*id, device, *cpu, direction, pieces, tape) {
                self.stalled.put_back(device, direction, first);
                break;
            }
        }
    }

    /// Maps that the trace asks for and that never got a slot, or wait for one still; those among them whose unmap was passed over.
    pub fn stalled_out(&self) -> (u64, u64) {
        let waiting = self.stalled.len() as u64;
        (self.stalled_out + waiting, self.stalled_out)
    }
}

/// What the steps of a plan need.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    mappings: usize,
    /// Of the longest list.
    segments: usize,
    cpus: usize,
    /// In the order of their first steps.
    devices: Vec<DeviceIndex>,
}

impl Needs {
    pub(crate) fn of(plan: &Plan) -> Self {
        let mut needs = Self {
            segments: 1,
            ..Self::default()
        };
        for timed in &plan.steps {
            let (device, cpu) = match timed.step {
                Step::Map {
                    id,
                    device,
                    cpu,
                    count,
                    ..
                } => {
                    needs.mappings = needs.mappings.max(id.index() + 1);
                    needs.segments = needs.segments.max(count as usize);
                    (device, cpu)
                }
                Step::Unmap { device, cpu, .. }
                | Step::EndBurst { device, cpu, .. }
                | Step::Doorbell { device, cpu, .. } => (device, cpu),
                Step::Tick => continue,
            };
            needs.cpus = needs.cpus.max(usize::from(cpu) + 1);
            if needs.devices.last() != Some(&device) && !needs.devices.contains(&device) {
                needs.devices.push(device);
            }
        }
        needs
    }
}

/// Apart from [`Replica::prepare`], which there is once for every replica's types.
fn make_room(
    needs: &Needs,
    held: &mut Vec<Held>,
    segments: &mut Vec<Segment>,
    attached: &mut Vec<Option<Attached>>,
) -> Result<(), LabError> {
    if held.len() < needs.mappings {
        held.resize_with(needs.mappings, Held::default);
    }
    if segments.len() < needs.segments {
        let range =
            ringfence_types::IovaRange::new(Iova::ZERO, 1).ok_or(LabError::Internal("segment"))?;
        segments.resize(needs.segments, Segment { range });
    }
    let devices = needs.devices.iter().map(|device| device.index() + 1);
    let devices = devices.max().unwrap_or(0);
    if attached.len() < devices {
        attached.resize(devices, None);
    }
    Ok(())
}

/// Takes a buffer that comes back. A function, which all replicas have in common, and no closure, which each would have of its own.
#[inline]
fn keep(buffer: u64) {
    black_box(buffer);
}

/// What became of a map.
enum Attempt {
    /// It is mapped, or refused for good.
    Settled,
    /// Its ring is full.
    Full,
}

/// The pages that the allocator gave for a mapping.
fn reserved<S: Space, F: Flush<S, u64>>(
    dma: &Dma<S, F, u64>,
    at: &Attachment,
    held: &Held,
) -> Option<PfnRange> {
    let mapped = PfnRange::covering(&held.range()?);
    Some(dma.space(at)?.reserved(mapped))
}

/// The replay's own loop, with everything but the layer.
#[derive(Debug, Default)]
pub struct Idle {
    held: Vec<Held>,
}

impl Idle {
    /// As [`Replica::run`].
    pub fn run(&mut self, plan: &Plan, clock: &mut Clock) {
        for block in plan.steps.chunks(BLOCK) {
            clock.begin();
            for timed in block {
                black_box(timed.time);
                match timed.step {
                    Step::Map {
                        id, first, count, ..
                    } => {
                        clock.map();
                        black_box(plan.segments(first, count));
                        black_box(self.held.get_mut(id.index()));
                    }
                    Step::Unmap { id, .. } => {
                        clock.unmap();
                        black_box(self.held.get_mut(id.index()));
                    }
                    Step::EndBurst { device, .. } => {
                        clock.unmap();
                        black_box(device);
                    }
                    Step::Doorbell { device, .. } => {
                        clock.map();
                        black_box(device);
                    }
                    Step::Tick => clock.unmap(),
                }
            }
            clock.end();
        }
    }
}
