//! One replay of the mapping layer alone, timed: no device, no oracle.

use std::hint::black_box;
use std::rc::Rc;

use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_dma::{
    AttachError, Attachment, Cpu, Dma, MapError, Outcome, Platform, Segment, SgLimits, SgRequest,
};
use ringfence_memory::{Arena, Frames};
use ringfence_types::{DeviceId, DomainId, Invalidator, Iova, Nanos, PfnRange};

use super::{Tape, cycles};
use crate::error::LabError;
use crate::plan::{Plan, Step, Timed};
use crate::replay::Held;

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

/// Reads the cycle counter: at both ends of each block, and where runs of maps and runs of unmaps meet if it is told to. One type for
/// both, since every replica is compiled for it.
#[derive(Debug, Default)]
pub struct Clock {
    /// Cycles of each block.
    pub blocks: Vec<u64>,
    /// Cycles of each block in runs of maps; empty unless runs are told apart.
    pub in_maps: Vec<u64>,
    /// Cycles of each block in runs of unmaps; empty unless runs are told apart.
    pub in_unmaps: Vec<u64>,
    /// What reading the counter twice costs, if runs are told apart.
    overhead: Option<u64>,
    began: u64,
    mapping: bool,
    since: u64,
    now: (u64, u64),
}

impl Clock {
    /// Times blocks.
    pub fn blocks() -> Self {
        Self::default()
    }

    /// Times runs of maps and of unmaps within blocks; `overhead` is what reading the counter twice costs.
    pub fn runs(overhead: u64) -> Self {
        Self {
            overhead: Some(overhead),
            ..Self::default()
        }
    }

    fn begin(&mut self) {
        self.now = (0, 0);
        self.mapping = false;
        self.began = cycles();
        self.since = self.began;
    }

    /// A map comes next.
    #[inline]
    fn map(&mut self) {
        if let Some(overhead) = self.overhead
            && !self.mapping
        {
            self.turn(overhead);
        }
    }

    /// An unmap, or what belongs to one, comes next.
    #[inline]
    fn unmap(&mut self) {
        if let Some(overhead) = self.overhead
            && self.mapping
        {
            self.turn(overhead);
        }
    }

    #[cold]
    fn turn(&mut self, overhead: u64) {
        self.close(overhead);
        self.mapping = !self.mapping;
    }

    fn close(&mut self, overhead: u64) {
        let spent = cycles().saturating_sub(self.since);
        let spent = spent.saturating_sub(overhead);
        if self.mapping {
            self.now.0 += spent;
        } else {
            self.now.1 += spent;
        }
        self.since = cycles();
    }

    fn end(&mut self) {
        self.blocks.push(cycles().saturating_sub(self.began));
        if let Some(overhead) = self.overhead {
            self.close(overhead);
            self.in_maps.push(self.now.0);
            self.in_unmaps.push(self.now.1);
        }
    }
}

/// A mapping layer on a platform of its own, driven by plans.
pub struct Replica<S: Space, F: Flush<S, u64>, I> {
    dma: Dma<S, F, u64>,
    cpus: Vec<Cpu<S, F, u64>>,
    attached: Vec<Option<Attachment>>,
    held: Vec<Held>,
    segments: Vec<Segment>,
    /// The platform.
    pub platform: Bench<I>,
    refused: u64,
    first_refusal: Option<MapError>,
    #[allow(clippy::type_complexity)]
    make: Box<dyn FnMut(DomainId, &Bench<I>) -> Result<S, LabError>>,
}

impl<S: Space, F: Flush<S, u64>, I: Invalidator> Replica<S, F, I> {
    /// A layer without domains; `make` makes the space of each device when it first maps.
    pub fn new(
        flush: F,
        platform: Bench<I>,
        make: impl FnMut(DomainId, &Bench<I>) -> Result<S, LabError> + 'static,
    ) -> Self {
        Self {
            dma: Dma::new(flush),
            cpus: Vec::new(),
            attached: Vec::new(),
            held: Vec::new(),
            segments: Vec::new(),
            platform,
            refused: 0,
            first_refusal: None,
            make: Box::new(make),
        }
    }

    /// Makes everything that the steps of `plan` need, so that the timed loop makes nothing.
    pub fn prepare(&mut self, plan: &Plan) -> Result<(), LabError> {
        let mut longest = 1;
        for timed in &plan.steps {
            let (device, cpu) = match timed.step {
                Step::Map {
                    id,
                    device,
                    cpu,
                    count,
                    ..
                } => {
                    longest = longest.max(count as usize);
                    if self.held.len() <= id.index() {
                        self.held.resize_with(id.index() + 1, Held::default);
                    }
                    (device, cpu)
                }
                Step::Unmap { device, cpu, .. } | Step::EndBurst { device, cpu, .. } => {
                    (device, cpu)
                }
                Step::Tick => continue,
            };
            while self.cpus.len() <= usize::from(cpu) {
                self.cpus.push(self.dma.cpu());
            }
            if self.attached.len() <= device.index() {
                self.attached.resize(device.index() + 1, None);
            }
            if self.attached[device.index()].is_none() {
                let platform = &self.platform;
                let make = &mut self.make;
                let at = self
                    .dma
                    .attach(DeviceId::new(device.0), Iova::new(u64::MAX), |domain| {
                        make(domain, platform)
                    })
                    .map_err(|error| match error {
                        AttachError::Space(error) => error,
                        _ => LabError::TooManyDevices,
                    })?;
                self.attached[device.index()] = Some(at);
            }
        }
        if self.segments.len() < longest {
            let range = ringfence_types::IovaRange::new(Iova::ZERO, 1)
                .ok_or(LabError::Internal("segment"))?;
            self.segments.resize(longest, Segment { range });
        }
        Ok(())
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
                    let (Some(Some(at)), Some(own), Some(slot)) = (
                        self.attached.get(device.index()),
                        self.cpus.get_mut(usize::from(cpu)),
                        self.held.get_mut(id.index()),
                    ) else {
                        continue;
                    };
                    let pieces = plan.segments(first, count);
                    let buffer = u64::from(id.0);
                    let held = if let [piece] = pieces {
                        match self.dma.map_single(
                            own,
                            &mut self.platform,
                            at,
                            buffer,
                            *piece,
                            direction,
                        ) {
                            Ok((mapping, _)) => Ok(Held::Single(mapping)),
                            Err((_, error)) => Err(error),
                        }
                    } else {
                        match self.dma.map_sg(
                            own,
                            &mut self.platform,
                            at,
                            SgRequest {
                                buffer,
                                pieces,
                                direction,
                                limits: SgLimits::default(),
                                out: &mut self.segments,
                            },
                        ) {
                            Ok((mapping, _)) => Ok(Held::List(mapping)),
                            Err((_, error)) => Err(error),
                        }
                    };
                    let held = held.unwrap_or_else(|error| {
                        self.refused += 1;
                        self.first_refusal.get_or_insert(error);
                        Held::None
                    });
                    if let Some(tape) = tape {
                        tape.record(reserved(&self.dma, at, &held));
                    }
                    *slot = held;
                }
                Step::Unmap { id, device, cpu } => {
                    clock.unmap();
                    let (Some(Some(at)), Some(own), Some(slot)) = (
                        self.attached.get(device.index()),
                        self.cpus.get_mut(usize::from(cpu)),
                        self.held.get_mut(id.index()),
                    ) else {
                        continue;
                    };
                    let outcome = match core::mem::take(slot) {
                        Held::None => continue,
                        Held::Single(mapping) => {
                            self.dma.unmap_single(own, &mut self.platform, at, mapping)
                        }
                        Held::List(mapping) => {
                            self.dma.unmap_sg(own, &mut self.platform, at, mapping)
                        }
                    };
                    let _ = black_box(outcome.ok().and_then(Outcome::into_buffer));
                }
                Step::EndBurst {
                    device,
                    cpu,
                    direction,
                } => {
                    clock.unmap();
                    let (Some(Some(at)), Some(own)) = (
                        self.attached.get(device.index()),
                        self.cpus.get_mut(usize::from(cpu)),
                    ) else {
                        continue;
                    };
                    let _ = self
                        .dma
                        .end_burst(own, &mut self.platform, at, direction, |buffer| {
                            black_box(buffer);
                        });
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
                    Step::Tick => clock.unmap(),
                }
            }
            clock.end();
        }
    }
}
