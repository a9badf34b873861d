//! A timed replay of the DMA layer alone, without device and oracle.

use std::hint::black_box;
use std::rc::Rc;

use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_dma::{
    AttachError, Attachment, Cpu, Dma, DmaSegment, MapError, MapReason, Outcome, Platform,
    SgLimits, SgRequest,
};
use ringfence_memory::{Arena, Frames};
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{
    Direction, DomainId, Invalidator, Iova, Nanos, PfnRange, PhysRange, RequesterId,
};

use super::{AllocTrace, Clock};
use crate::error::LabError;
use crate::plan::{Plan, Step, TimedStep};
use crate::replay::{AttachInfo, Attachments, MappingToken, StalledMap, StalledMaps};

/// The platform of a timed replay.
#[derive(Debug)]
pub struct TimedPlatform<I> {
    /// Memory for tables.
    pub arena: Rc<Arena>,
    /// Frames of `arena`.
    pub frames: Frames<Rc<Arena>>,
    /// The layer's interface for invalidations.
    pub invalidator: I,
    /// Current time on the trace's clock.
    pub now: Nanos,
}

impl<I: Invalidator> Platform for TimedPlatform<I> {
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

/// Number of steps between clock reads: enough to make the reads negligible, and few enough that
/// other processes disturb few blocks.
const BLOCK: usize = 1024;

/// A DMA layer on its own platform, driven by plans.
pub struct TimedReplay<S: Space, F: Flush<S, u64>, I> {
    dma: Dma<S, F, u64>,
    cpus: Vec<Cpu<S, F, u64>>,
    attachments: Vec<Option<Attachments>>,
    tokens: Vec<MappingToken>,
    stalled: StalledMaps,
    stalled_out: u64,
    segments: Vec<DmaSegment>,
    /// Memory, clock and invalidator of this replay.
    pub platform: TimedPlatform<I>,
    refused: u64,
    first_refusal: Option<MapError>,
    #[allow(clippy::type_complexity)]
    make: Box<dyn FnMut(&AttachInfo, &TimedPlatform<I>) -> Result<S, LabError>>,
}

impl<S: Space, F: Flush<S, u64>, I: Invalidator> TimedReplay<S, F, I> {
    /// Creates a layer without domains. `make` creates the space of each device at its first map.
    pub fn new(
        flush: F,
        platform: TimedPlatform<I>,
        make: impl FnMut(&AttachInfo, &TimedPlatform<I>) -> Result<S, LabError> + 'static,
    ) -> Self {
        Self {
            dma: Dma::new(flush),
            cpus: Vec::new(),
            attachments: Vec::new(),
            tokens: Vec::new(),
            stalled: StalledMaps::default(),
            stalled_out: 0,
            segments: Vec::new(),
            platform,
            refused: 0,
            first_refusal: None,
            make: Box::new(make),
        }
    }

    /// Allocates everything that the steps of `plan` need, so that the timed loop does not
    /// allocate.
    pub fn prepare(&mut self, plan: &Plan) -> Result<(), LabError> {
        self.provide(&PlanResources::of(plan))
    }

    /// Like [`prepare`](Self::prepare), for known needs.
    pub(crate) fn provide(&mut self, needs: &PlanResources) -> Result<(), LabError> {
        make_room(
            needs,
            &mut self.tokens,
            &mut self.segments,
            &mut self.attachments,
        )?;
        for &device in &needs.devices {
            if self.attachments[device.index()].is_none() {
                self.attachments[device.index()] = Some(self.attach(device)?);
            }
        }
        while self.cpus.len() < needs.cpus {
            self.cpus.push(self.dma.cpu());
        }
        Ok(())
    }

    fn attach(&mut self, device: DeviceIndex) -> Result<Attachments, LabError> {
        let (platform, make) = (&self.platform, &mut self.make);
        let id = RequesterId::new(device.0);
        // Use dynamic dispatch, so that replays with the same space on different platforms share
        // one copy of the caller.
        let make: &mut dyn FnMut(DomainId) -> Result<S, LabError> = &mut |domain| {
            let newcomer = AttachInfo {
                domain,
                device: id,
                index: device,
            };
            make(&newcomer, platform)
        };
        let at = self.dma.attach(id, Iova::new(u64::MAX), make);
        let at = at.map_err(|error| match error {
            AttachError::Space(error) => error,
            _ => LabError::TooManyDevices,
        })?;
        Ok(Attachments::new(&self.dma, at))
    }

    /// Returns the number of refused maps and the first error; `None` if the layer refused no map.
    pub fn refusals(&self) -> Option<(u64, MapError)> {
        self.first_refusal.map(|first| (self.refused, first))
    }

    /// Performs the steps of `plan` and reports each to `clock`. With a tape, records the ranges
    /// that the maps got.
    pub fn run(&mut self, plan: &Plan, clock: &mut Clock, tape: Option<&AllocTrace>) {
        for block in plan.steps.chunks(BLOCK) {
            clock.begin();
            self.run_block(plan, block, clock, tape);
            clock.end();
        }
    }

    #[inline]
    fn run_block(
        &mut self,
        plan: &Plan,
        block: &[TimedStep],
        clock: &mut Clock,
        tape: Option<&AllocTrace>,
    ) {
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
                        if let MapAttempt::Done = attempt {
                            continue;
                        }
                    }
                    let pieces = pieces.into();
                    self.stalled
                        .push_back(device, direction, StalledMap { id, cpu, pieces });
                }
                Step::Unmap {
                    id,
                    device,
                    cpu,
                    direction,
                } => {
                    clock.unmap();
                    let (Some(Some(attached)), Some(own), Some(slot)) = (
                        self.attachments.get(device.index()),
                        self.cpus.get_mut(usize::from(cpu)),
                        self.tokens.get_mut(id.index()),
                    ) else {
                        continue;
                    };
                    let at = attached.for_direction(direction);
                    let outcome = match core::mem::take(slot) {
                        MappingToken::None => {
                            self.unmap_unmapped(id, device, direction, tape);
                            continue;
                        }
                        MappingToken::Single(mapping) => {
                            self.dma.unmap_single(own, &mut self.platform, at, mapping)
                        }
                        MappingToken::List(mapping) => {
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
                        self.attachments.get(device.index()),
                        self.cpus.get_mut(usize::from(cpu)),
                    ) else {
                        continue;
                    };
                    let at = attached.for_direction(direction);
                    let _ =
                        self.dma
                            .end_burst(own, &mut self.platform, at, direction, discard_buffer);
                    if !self.stalled.is_empty() {
                        self.retry(device, direction, tape);
                    }
                }
                Step::Doorbell {
                    device,
                    cpu,
                    direction,
                } => {
                    // The write-backs belong to the preceding maps.
                    clock.map();
                    if let (Some(Some(attached)), Some(own)) = (
                        self.attachments.get(device.index()),
                        self.cpus.get_mut(usize::from(cpu)),
                    ) {
                        let at = attached.for_direction(direction);
                        self.dma.sync_map(own, &mut self.platform, at);
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

impl<S: Space, F: Flush<S, u64>, I: Invalidator> TimedReplay<S, F, I> {
    #[inline(always)]
    fn map(
        &mut self,
        id: MappingId,
        device: DeviceIndex,
        cpu: u16,
        direction: Direction,
        pieces: &[PhysRange],
        tape: Option<&AllocTrace>,
    ) -> MapAttempt {
        let (Some(Some(attached)), Some(own), Some(slot)) = (
            self.attachments.get(device.index()),
            self.cpus.get_mut(usize::from(cpu)),
            self.tokens.get_mut(id.index()),
        ) else {
            return MapAttempt::Done;
        };
        let at = attached.for_direction(direction);
        let buffer = u64::from(id.0);
        let held = if let [piece] = pieces {
            self.dma
                .map_single(own, &mut self.platform, at, buffer, *piece, direction)
                .map(|(mapping, _)| MappingToken::Single(mapping))
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
                .map(|(mapping, _)| MappingToken::List(mapping))
        };
        let held = match held {
            Ok(held) => held,
            Err((_, error)) => {
                if let Some(tape) = tape {
                    tape.record(None);
                }
                if matches!(error.reason, MapReason::RingFull(_)) {
                    return MapAttempt::RingFull;
                }
                self.refused += 1;
                self.first_refusal.get_or_insert(error);
                MappingToken::None
            }
        };
        if let Some(tape) = tape {
            match &held {
                MappingToken::None => {}
                MappingToken::List(list) if !S::CONTIGUOUS_SG && list.range().is_none() => {
                    for segment in self.segments.iter().take(pieces.len()) {
                        tape.record(Some(PfnRange::covering(&segment.range)));
                    }
                }
                held => tape.record(reserved(&self.dma, at, held)),
            }
        }
        *slot = held;
        MapAttempt::Done
    }

    /// Handles an unmap without a mapping: the layer refused its map, or the map still waits.
    #[cold]
    fn unmap_unmapped(
        &mut self,
        id: MappingId,
        device: DeviceIndex,
        direction: Direction,
        tape: Option<&AllocTrace>,
    ) {
        if S::CAN_BE_FULL && self.stalled.give_up(device, direction, id) {
            self.stalled_out += 1;
            self.retry(device, direction, tape);
        }
    }

    /// Performs the waiting maps of a ring in order until the ring is full.
    #[cold]
    fn retry(&mut self, device: DeviceIndex, direction: Direction, tape: Option<&AllocTrace>) {
        // In other spaces no map waits: avoid another copy of the map code.
        if !S::CAN_BE_FULL {
            return;
        }
        while let Some(first) = self.stalled.pop(device, direction) {
            let StalledMap { id, cpu, pieces } = &first;
            if let MapAttempt::RingFull = self.map(*id, device, *cpu, direction, pieces, tape) {
                self.stalled.push_front(device, direction, first);
                break;
            }
        }
    }

    /// Returns the number of maps in the trace that never got a slot, or still wait for one. The
    /// second number counts those whose unmap was skipped.
    pub fn stalled_out(&self) -> (u64, u64) {
        let waiting = self.stalled.len() as u64;
        (self.stalled_out + waiting, self.stalled_out)
    }
}

/// The resources that the steps of a plan need.
#[derive(Debug, Default)]
pub(crate) struct PlanResources {
    mappings: usize,
    /// Number of segments of the longest list.
    segments: usize,
    cpus: usize,
    /// Devices in order of their first steps.
    devices: Vec<DeviceIndex>,
}

impl PlanResources {
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

/// Grows the tables of a replay. Separate from [`TimedReplay::prepare`], which is compiled for
/// every replay's types.
fn make_room(
    needs: &PlanResources,
    held: &mut Vec<MappingToken>,
    segments: &mut Vec<DmaSegment>,
    attached: &mut Vec<Option<Attachments>>,
) -> Result<(), LabError> {
    if held.len() < needs.mappings {
        held.resize_with(needs.mappings, MappingToken::default);
    }
    if segments.len() < needs.segments {
        let range =
            ringfence_types::IovaRange::new(Iova::ZERO, 1).ok_or(LabError::Internal("segment"))?;
        segments.resize(needs.segments, DmaSegment { range });
    }
    let devices = needs.devices.iter().map(|device| device.index() + 1);
    let devices = devices.max().unwrap_or(0);
    if attached.len() < devices {
        attached.resize(devices, None);
    }
    Ok(())
}

/// Consumes a returned buffer. A function rather than a closure, so that all replays share one
/// copy.
#[inline]
fn discard_buffer(buffer: u64) {
    black_box(buffer);
}

/// The result of a map.
enum MapAttempt {
    /// The map succeeded, or the layer refused it for good.
    Done,
    /// The ring is full.
    RingFull,
}

/// Returns the pages that the allocator reserved for a mapping.
fn reserved<S: Space, F: Flush<S, u64>>(
    dma: &Dma<S, F, u64>,
    at: &Attachment,
    held: &MappingToken,
) -> Option<PfnRange> {
    let mapped = PfnRange::covering(&held.range()?);
    Some(dma.space(at)?.reserved(mapped))
}

/// The replay's own loop without the DMA layer.
#[derive(Debug, Default)]
pub struct EmptyLoop {
    tokens: Vec<MappingToken>,
}

impl EmptyLoop {
    /// Performs the steps like [`TimedReplay::run`].
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
                        black_box(self.tokens.get_mut(id.index()));
                    }
                    Step::Unmap { id, .. } => {
                        clock.unmap();
                        black_box(self.tokens.get_mut(id.index()));
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
