//! One replay with devices, hardware and oracle: every access is made, translated and judged.

use std::collections::HashMap;

use ringfence_devices::{Attacker, Event, Mapping as Target, Passive, Port, Request};
use ringfence_dma::flush::{Flush, Released};
use ringfence_dma::space::Space;
use ringfence_dma::{
    Attachment, Cpu, Dma, MapError, Outcome, Owed, Segment, SgLimits, SgRequest, UnmapError,
    UnmapReason,
};
use ringfence_hw::Stats;
use ringfence_trace::{DeviceIndex, Devices, MappingId};
use ringfence_types::{
    DeviceId, Direction, DomainId, Fault, Iova, IovaRange, Nanos, PfnRange, PhysRange,
};

use super::Held;
use super::eye::{DeviceRows, Eye};
use crate::error::LabError;
use crate::hardware::{Directed, Hardware};
use crate::machine::Machine;
use crate::oracle::{GrantId, Oracle, Ownership, Tally, Windows};
use crate::plan::{Plan, Step};

/// No attacker.
#[derive(Debug, Clone, Copy, Default)]
pub struct Nobody;

impl Attacker for Nobody {
    #[inline]
    fn on<P: Port>(&mut self, _event: &Event, _port: &mut P) {}
}

/// What one replay has shown.
#[derive(Debug, Clone, Default)]
pub struct Outcomes {
    /// Mappings made.
    pub maps: u64,
    /// Mappings ended by the trace.
    pub unmaps: u64,
    /// Maps that the layer refused.
    pub refused_maps: u64,
    /// The first refusal.
    pub first_refusal: Option<MapError>,
    /// Unmaps that the layer refused: nothing changed.
    pub refused_unmaps: u64,
    /// Buffers that never came back because their invalidation failed, to the end.
    pub not_flushed: u64,
    /// Verdicts.
    pub tally: Tally,
    /// Accesses of the attackers.
    pub attempts: u64,
    /// Steps of the allocator's searches, summed up.
    pub search_steps: u64,
    /// Longest search.
    pub search_max: u32,
    /// Invalidations the layer submitted.
    pub invalidations: u64,
    /// What the hardware counted.
    pub hardware: Stats,
    /// Most mappings alive at once.
    pub live_max: u64,
    /// Bytes of tables, at most.
    pub table_bytes: u64,
    /// Longest stale window.
    pub stale_max_ns: u64,
    /// Bytes times seconds of all stale windows.
    pub stale_byte_seconds: f64,
    /// Longest time a buffer was withheld.
    pub release_delay_max_ns: u64,
    /// Mappings that the trace does not end.
    pub alive_at_end: u64,
}

/// The space of a device, made when it first maps, and where its context points.
pub type MakeSpace<S, H> = Box<dyn FnMut(DomainId, &Machine<H>) -> Result<(S, Directed), LabError>>;

/// A mapping layer, a machine and an oracle, driven by plans.
pub struct Judged<H, S: Space, F: Flush<S, u64>, X> {
    machine: Machine<H>,
    dma: Dma<S, F, u64>,
    cpus: Vec<Cpu<S, F, u64>>,
    attached: Vec<Option<Attachment>>,
    held: Vec<Held>,
    segments: Vec<Segment>,
    make: MakeSpace<S, H>,
    oracle: Oracle,
    /// Whether a map installs anything that an invalidation could ever remove.
    installs: bool,
    rows: DeviceRows,
    windows: Windows,
    withheld: HashMap<u64, Nanos>,
    /// Mappings whose invalidation failed: their buffers are withheld until it succeeds.
    owed: Vec<Owed<u64>>,
    attacker: X,
    live: u64,
    scratch: Vec<IovaRange>,
    outcomes: Outcomes,
}

/// The bus as devices use it.
struct Counted<'a, H> {
    machine: &'a mut Machine<H>,
    oracle: &'a mut Oracle,
    rows: &'a DeviceRows,
    accesses: u64,
}

impl<H: Hardware> Port for Counted<'_, H> {
    #[inline]
    fn access(&mut self, request: &Request) -> Result<(), Fault> {
        self.accesses += 1;
        let eye = Eye {
            oracle: self.oracle,
            rows: self.rows,
        };
        self.machine.probe(request, eye)
    }
}

impl<H: Hardware, S: Space, F: Flush<S, u64>, X: Attacker> Judged<H, S, F, X> {
    /// A replay of a layer with `flush` on `machine`.
    pub fn new(
        machine: Machine<H>,
        flush: F,
        ownership: Ownership,
        attacker: X,
        make: MakeSpace<S, H>,
    ) -> Self {
        Self {
            machine,
            dma: Dma::new(flush),
            cpus: Vec::new(),
            attached: Vec::new(),
            held: Vec::new(),
            segments: Vec::new(),
            make,
            oracle: Oracle::new(ownership),
            installs: ownership == Ownership::Page,
            rows: DeviceRows::default(),
            windows: Windows::default(),
            withheld: HashMap::new(),
            owed: Vec::new(),
            attacker,
            live: 0,
            scratch: Vec::new(),
            outcomes: Outcomes::default(),
        }
    }

    /// Performs the steps of `plan`.
    pub fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError> {
        for timed in &plan.steps {
            self.machine.now = timed.time;
            match timed.step {
                Step::Map {
                    id,
                    device,
                    cpu,
                    direction,
                    first,
                    count,
                } => {
                    let pieces = plan.segments(first, count);
                    self.map(id, device, devices, cpu, direction, pieces)?;
                }
                Step::Unmap { id, device, cpu } => {
                    self.unmap(id, device, cpu, true);
                }
                Step::EndBurst {
                    device,
                    cpu,
                    direction,
                } => self.end_burst(device, cpu, direction),
                Step::Tick => {
                    if let Some(own) = self.cpus.first_mut() {
                        // A failed flush shows as stale windows that stay open.
                        let _ = self.dma.tick(own, &mut self.machine);
                    }
                    if !self.owed.is_empty() {
                        self.settle();
                    }
                    self.attack(&Event::Other);
                }
            }
            self.close_windows();
        }
        Ok(())
    }

    #[inline]
    fn close_windows(&mut self) {
        let now = self.machine.now;
        for request in self.machine.iommu.completed.drain(..) {
            self.windows.close(&request, now);
        }
    }

    fn attach(&mut self, device: DeviceIndex, devices: &Devices) -> Result<(), LabError> {
        if self.attached.len() <= device.index() {
            self.attached.resize(device.index() + 1, None);
        }
        if self.attached[device.index()].is_some() {
            return Ok(());
        }
        let recorded = devices
            .get(device)
            .map_or(DeviceId::new(device.0), |device| device.id);
        let id = H::requester(device.0, recorded).ok_or(LabError::TooManyDevices)?;
        let (machine, make) = (&self.machine, &mut self.make);
        let mut directed = Directed::PassThrough;
        let at = self
            .dma
            .attach(id, Iova::new(u64::MAX), |domain| {
                let (space, to) = make(domain, machine)?;
                directed = to;
                Ok::<_, LabError>(space)
            })
            .map_err(|error| match error {
                ringfence_dma::AttachError::Space(error) => error,
                _ => LabError::TooManyDevices,
            })?;
        self.machine.attach(id, at.domain(), directed)?;
        self.rows.set(id, device.0);
        self.attached[device.index()] = Some(at);
        Ok(())
    }

    fn map(
        &mut self,
        id: MappingId,
        device: DeviceIndex,
        devices: &Devices,
        cpu: u16,
        direction: Direction,
        pieces: &[PhysRange],
    ) -> Result<(), LabError> {
        if self
            .attached
            .get(device.index())
            .is_none_or(Option::is_none)
        {
            self.attach(device, devices)?;
        }
        while self.cpus.len() <= usize::from(cpu) {
            self.cpus.push(self.dma.cpu());
        }
        if self.held.len() <= id.index() {
            self.held.resize_with(id.index() + 1, Held::default);
        }
        let (Some(Some(at)), Some(own)) = (
            self.attached.get(device.index()),
            self.cpus.get_mut(usize::from(cpu)),
        ) else {
            return Err(LabError::Internal("attachment"));
        };
        // The grant's name travels as the buffer; it is known only once the addresses are.
        let next = self.oracle.next();
        let mapped = if let [piece] = pieces {
            self.dma
                .map_single(own, &mut self.machine, at, next, *piece, direction)
                .map(|(mapping, placed)| (Held::Single(mapping), placed.steps))
        } else {
            if let (Some(first), true) = (pieces.first(), self.segments.len() < pieces.len()) {
                let range = IovaRange::new(Iova::new(first.start().get()), 1)
                    .ok_or(LabError::Internal("segment"))?;
                self.segments.resize(pieces.len(), Segment { range });
            }
            let limits = SgLimits::default();
            self.dma
                .map_sg(
                    own,
                    &mut self.machine,
                    at,
                    SgRequest {
                        buffer: next,
                        pieces,
                        direction,
                        limits,
                        out: &mut self.segments,
                    },
                )
                .map(|(mapping, _)| {
                    let steps = mapping.steps;
                    (Held::List(mapping), steps)
                })
        };
        let (held, steps) = match mapped {
            Ok(made) => made,
            Err((_, error)) => {
                self.outcomes.refused_maps += 1;
                self.outcomes.first_refusal.get_or_insert(error);
                return Ok(());
            }
        };
        // Where pieces lie apart, addresses are the memory's own, and the first piece stands for the list.
        let alone =
            |piece: &PhysRange| IovaRange::new(Iova::new(piece.start().get()), piece.bytes());
        let range = held.range().or_else(|| pieces.first().and_then(alone));
        let range = range.ok_or(LabError::Internal("mapping without range"))?;
        let device_id = at.device();
        let granted = self.oracle.grant(device.index(), range, pieces, direction);
        debug_assert_eq!(granted.to_raw(), next);
        self.held[id.index()] = held;
        self.live += 1;
        let outcomes = &mut self.outcomes;
        outcomes.maps += 1;
        outcomes.live_max = outcomes.live_max.max(self.live);
        outcomes.search_steps += u64::from(steps);
        outcomes.search_max = outcomes.search_max.max(steps);
        self.attack(&Event::Mapped(Target {
            device: device_id,
            range,
            direction,
        }));
        Ok(())
    }

    fn unmap(&mut self, id: MappingId, device: DeviceIndex, cpu: u16, used: bool) {
        let Some(slot) = self.held.get_mut(id.index()) else {
            return;
        };
        let held = core::mem::take(slot);
        let Some(Some(at)) = self.attached.get(device.index()).copied() else {
            return;
        };
        while self.cpus.len() <= usize::from(cpu) {
            self.cpus.push(self.dma.cpu());
        }
        let (direction, raw) = match &held {
            Held::Single(mapping) => (mapping.direction(), *mapping.buffer()),
            Held::List(mapping) => (mapping.direction(), *mapping.buffer()),
            Held::None => return,
        };
        let grant = GrantId::from_raw(raw);
        let first = || {
            self.oracle
                .get(grant)
                .and_then(|grant| grant.pieces().next())
        };
        let Some(range) = held.range().or_else(first) else {
            return;
        };
        let target = Target {
            device: at.device(),
            range,
            direction,
        };
        let mut bytes = range.bytes();
        if used {
            self.use_buffer(grant, &target, &mut bytes);
            self.attack(&Event::Unmapping(target));
        }
        let Some(own) = self.cpus.get_mut(usize::from(cpu)) else {
            return;
        };
        let outcome = match held {
            Held::Single(mapping) => self.dma.unmap_single(own, &mut self.machine, &at, mapping),
            Held::List(mapping) => self.dma.unmap_sg(own, &mut self.machine, &at, mapping),
            Held::None => return,
        };
        self.live -= 1;
        self.outcomes.unmaps += u64::from(used);
        match outcome {
            Ok(outcome) => {
                let stale = outcome.is_stale();
                if outcome.into_buffer().is_some() {
                    self.oracle.release(grant);
                    if stale {
                        let pages = PfnRange::covering(&range);
                        let now = self.machine.now;
                        if self.installs {
                            // A flush that this unmap triggered came after its entry was cleared: it closes this window too.
                            self.windows.open(at.domain(), pages, bytes, now);
                            self.close_windows();
                        } else {
                            self.windows.open_for_good(bytes, now);
                        }
                    }
                } else {
                    self.withhold(grant);
                }
            }
            Err(UnmapError {
                reason: UnmapReason::NotFlushed(_, owed),
                ..
            }) => {
                self.withhold(grant);
                self.owed.push(owed);
            }
            Err(_) => self.outcomes.refused_unmaps += 1,
        }
        if used {
            self.attack(&Event::Unmapped(target));
        }
    }

    /// The buffer stays with the layer.
    fn withhold(&mut self, grant: GrantId) {
        self.oracle.withhold(grant);
        self.withheld.insert(grant.to_raw(), self.machine.now);
    }

    /// Tries the invalidations again that have failed.
    #[cold]
    fn settle(&mut self) {
        let Some(own) = self.cpus.first_mut() else {
            return;
        };
        for owed in core::mem::take(&mut self.owed) {
            match self.dma.settle(own, &mut self.machine, owed) {
                Ok(Released(raw)) => {
                    let (oracle, withheld) = (&mut self.oracle, &mut self.withheld);
                    give_back(oracle, withheld, &mut self.outcomes, raw, self.machine.now);
                }
                Err((_, owed)) => self.owed.push(owed),
            }
        }
    }

    /// One access to each page of the buffer, in its direction.
    fn use_buffer(&mut self, grant: GrantId, target: &Target, bytes: &mut u64) {
        let mut pieces = core::mem::take(&mut self.scratch);
        pieces.clear();
        if let Some(grant) = self.oracle.get(grant) {
            pieces.extend(grant.pieces());
        }
        *bytes = pieces.iter().map(IovaRange::bytes).sum();
        let mut port = Counted {
            machine: &mut self.machine,
            oracle: &mut self.oracle,
            rows: &self.rows,
            accesses: 0,
        };
        for range in &pieces {
            let piece = Target {
                range: *range,
                ..*target
            };
            Passive.on(&Event::Unmapping(piece), &mut port);
        }
        self.scratch = pieces;
    }

    #[inline]
    fn attack(&mut self, event: &Event) {
        let mut port = Counted {
            machine: &mut self.machine,
            oracle: &mut self.oracle,
            rows: &self.rows,
            accesses: 0,
        };
        self.attacker.on(event, &mut port);
        self.outcomes.attempts += port.accesses;
    }

    fn end_burst(&mut self, device: DeviceIndex, cpu: u16, direction: Direction) {
        let (Some(Some(at)), Some(own)) = (
            self.attached.get(device.index()),
            self.cpus.get_mut(usize::from(cpu)),
        ) else {
            return;
        };
        let now = self.machine.now;
        let (oracle, withheld, outcomes) =
            (&mut self.oracle, &mut self.withheld, &mut self.outcomes);
        // A failed invalidation leaves the buffers withheld: they are in no danger.
        let _ = self
            .dma
            .end_burst(own, &mut self.machine, at, direction, |raw| {
                give_back(oracle, withheld, outcomes, raw, now);
            });
    }

    /// Ends the replay: takes down what is alive, unmetered, and counts windows that are open until now.
    pub fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes {
        self.outcomes.tally = self.oracle.tally;
        self.outcomes.invalidations = self.machine.iommu.count;
        self.outcomes.hardware = *self.machine.stats();
        self.outcomes.table_bytes = self.machine.table_bytes().1;
        self.outcomes.alive_at_end = self.live;
        self.outcomes.not_flushed = self.withheld.len() as u64;
        let now = self.machine.now;
        self.windows.finish(now);
        self.outcomes.stale_max_ns = self.windows.longest_ns;
        self.outcomes.stale_byte_seconds = self.windows.byte_seconds();
        for (id, device) in alive {
            self.unmap(*id, *device, 0, false);
        }
        self.outcomes.clone()
    }
}

/// A withheld buffer is back with its owner.
fn give_back(
    oracle: &mut Oracle,
    withheld: &mut HashMap<u64, Nanos>,
    outcomes: &mut Outcomes,
    raw: u64,
    now: Nanos,
) {
    oracle.release(GrantId::from_raw(raw));
    if let Some(since) = withheld.remove(&raw) {
        let delay = now.since(since);
        outcomes.release_delay_max_ns = outcomes.release_delay_max_ns.max(delay);
    }
}
