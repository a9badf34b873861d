//! A replay with devices, hardware and oracle: it translates and judges every access.

mod drain;
mod map;
mod search;
mod unmap;

use std::collections::HashMap;

use ringfence_devices::{Attacker, DeviceMapping as Target, DmaPort, DriverEvent, Passive};
use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_dma::{Cpu, Dma, DmaSegment, NotInvalidated};
use ringfence_trace::{DeviceIndex, Devices, MappingId};
use ringfence_types::{Direction, Iova, IovaRange, Nanos, RequesterId};

use search::Search;

use super::bus::CheckedBus;
use super::oracle_observer::DeviceIndexTable;
use super::stalled::ring_number;
use super::{AttachInfo, Attachments, MappingToken, Outcomes, StalledMaps};
use crate::error::LabError;
use crate::guest::RtcParams;
use crate::hardware::{ContextTarget, Hardware};
use crate::limits::ReplayLimits;
use crate::oracle::{GrantId, Oracle, Ownership, Windows};
use crate::plan::{Plan, Step};
use crate::platform::ReplayPlatform;

/// The absence of an attacker.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoAttacker;

impl Attacker for NoAttacker {
    #[inline]
    fn on<P: DmaPort>(&mut self, _event: &DriverEvent, _port: &mut P) {}
}

/// Creates the space of a device at its first map, and the target of its context entry.
pub type MakeSpace<S, H> =
    Box<dyn FnMut(&AttachInfo, &ReplayPlatform<H>) -> Result<(S, ContextTarget), LabError>>;

/// A DMA layer, a platform and an oracle, driven by plans.
pub struct CheckedReplay<H, S: Space, F: Flush<S, u64>, X> {
    machine: ReplayPlatform<H>,
    dma: Dma<S, F, u64>,
    cpus: Vec<Cpu<S, F, u64>>,
    attached: Vec<Option<Attachments>>,
    /// Number of attached devices.
    devices: usize,
    tokens: Vec<MappingToken>,
    stalled: StalledMaps,
    segments: Vec<DmaSegment>,
    make: MakeSpace<S, H>,
    oracle: Oracle,
    /// True if maps install translations that an invalidation can remove.
    installs: bool,
    rows: DeviceIndexTable,
    windows: Windows,
    withheld: HashMap<u64, Nanos>,
    /// Mappings whose invalidation failed. The layer withholds their buffers until it succeeds.
    not_invalidated: Vec<NotInvalidated<u64>>,
    attacker: X,
    live: u64,
    search: Search,
    /// True if the device also accesses each page of a buffer right after its map.
    early: bool,
    /// T and C of a space that keeps unmapped mappings; `None` for other spaces.
    cycling: Option<RtcParams>,
    scratch: Vec<IovaRange>,
    /// IOVA ranges of the current mapping: one, or one for each segment if segments have separate
    /// ranges.
    device_ranges: Vec<IovaRange>,
    outcomes: Outcomes,
    limits: ReplayLimits,
}

impl<H: Hardware, S: Space, F: Flush<S, u64>, X: Attacker> CheckedReplay<H, S, F, X> {
    /// Creates a replay of a DMA layer with the policy `flush` on `machine`.
    pub fn new(
        machine: ReplayPlatform<H>,
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
            devices: 0,
            tokens: Vec::new(),
            stalled: StalledMaps::default(),
            segments: Vec::new(),
            make,
            oracle: Oracle::new(ownership),
            installs: ownership != Ownership::Byte,
            rows: DeviceIndexTable::default(),
            windows: Windows::default(),
            withheld: HashMap::new(),
            not_invalidated: Vec::new(),
            attacker,
            live: 0,
            search: Search::default(),
            early: false,
            cycling: None,
            scratch: Vec::new(),
            device_ranges: Vec::new(),
            outcomes: Outcomes::default(),
            limits: ReplayLimits::default(),
        }
    }

    /// If `early` is true, the device accesses each page of a buffer right after its map, as well
    /// as before its unmap. Not for walkers that see a map only after its doorbell.
    #[must_use]
    pub fn with_early_touches(mut self, early: bool) -> Self {
        self.early = early;
        self
    }

    /// Sets the limits of the replay.
    #[must_use]
    pub fn with_limits(mut self, limits: ReplayLimits) -> Self {
        self.limits = limits;
        self.oracle = self.oracle.with_most(limits.buffers_on_a_page);
        self
    }

    /// Runs the replay on after its trace until a space with these cycles has dropped all mappings
    /// that it keeps.
    #[must_use]
    pub fn with_cycling(mut self, cycling: Option<RtcParams>) -> Self {
        self.cycling = cycling;
        self
    }

    /// Performs the steps of `plan`.
    ///
    /// # Errors
    /// The trace exceeds a limit, or a device cannot be attached.
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
                    self.attach(device, devices)?;
                    self.map_in_turn(id, device, cpu, direction, pieces)?;
                    self.check_page(device, devices)?;
                }
                Step::Unmap {
                    id,
                    device,
                    cpu,
                    direction,
                } => {
                    if self.stalled.queues(device, direction)
                        && self.stalled.give_up(device, direction, id)
                    {
                        self.outcomes.stalled_out += 1;
                        self.outcomes
                            .ring(ring_number(device, direction))
                            .stalled_out += 1;
                    } else {
                        self.unmap(id, device, cpu, true);
                        self.check_kept()?;
                    }
                    self.retry(device, direction)?;
                }
                Step::EndBurst {
                    device,
                    cpu,
                    direction,
                } => {
                    self.end_burst(device, cpu, direction);
                    self.retry(device, direction)?;
                }
                Step::Doorbell {
                    device,
                    cpu,
                    direction,
                } => self.doorbell(device, cpu, direction),
                // Skip ticks that only the cycles of other modes require: they would add attacks.
                Step::Tick
                    if !S::CACHES_UNMAPPED && plan.quiet.binary_search(&timed.time).is_ok() => {}
                Step::Tick => {
                    if let Some(own) = self.cpus.first_mut() {
                        // A failed flush shows as stale windows that stay open.
                        let _ = self.dma.tick(own, &mut self.machine);
                    }
                    if !self.not_invalidated.is_empty() {
                        self.retry_invalidations();
                    }
                    self.attack(&DriverEvent::Other);
                }
            }
            self.close_windows();
        }
        Ok(())
    }

    /// Fails if a page has more buffers than the oracle can judge.
    #[inline]
    fn check_page(&self, device: DeviceIndex, devices: &Devices) -> Result<(), LabError> {
        match self.oracle.crowded() {
            None => Ok(()),
            Some(page) => Err(LabError::CrowdedPage {
                device: devices
                    .get(device)
                    .map(|row| row.name.clone())
                    .unwrap_or_default(),
                page,
                limit: self.limits.buffers_on_a_page,
            }),
        }
    }

    /// Fails if the cache keeps more mappings than the limit allows.
    #[inline]
    fn check_kept(&self) -> Result<(), LabError> {
        let limit = self.limits.kept;
        match self.windows.kept() > limit {
            true => Err(LabError::Kept { limit }),
            false => Ok(()),
        }
    }

    #[inline]
    fn close_windows(&mut self) {
        let now = self.machine.now;
        let windows = &mut self.windows;
        let iommu = &mut self.machine.iommu;
        iommu.each_completed(|request| windows.close(&request, now));
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
            .map_or(RequesterId::new(device.0), |device| device.id);
        let id = H::requester(self.devices, recorded)?;
        let (machine, make) = (&self.machine, &mut self.make);
        let mut directed = ContextTarget::PassThrough;
        let at = self
            .dma
            .attach(id, Iova::new(u64::MAX), |domain| {
                let newcomer = AttachInfo {
                    domain,
                    device: id,
                    index: device,
                };
                let (space, to) = make(&newcomer, machine)?;
                directed = to;
                Ok::<_, LabError>(space)
            })
            .map_err(|error| match error {
                ringfence_dma::AttachError::Space(error) => error,
                _ => LabError::TooManyDevices,
            })?;
        self.machine.attach(id, at.domain(), directed)?;
        self.rows.set(id, device.0);
        self.attached[device.index()] = Some(Attachments::new(&self.dma, at));
        self.devices += 1;
        Ok(())
    }

    /// Returns true if the segments of a list have separate IOVA ranges.
    fn is_apart(&self) -> bool {
        self.installs && !S::CONTIGUOUS_SG
    }

    /// Reports the driver's operation on the current mapping to the attacker.
    fn attack_event(
        &mut self,
        what: fn(Target) -> DriverEvent,
        device: RequesterId,
        direction: Direction,
    ) {
        let told = core::mem::take(&mut self.device_ranges);
        for range in &told {
            self.attack(&what(Target {
                device,
                range: *range,
                direction,
            }));
        }
        self.device_ranges = told;
    }

    /// Accesses each page of the buffer once, in its direction. Sets `bytes` to the size of the
    /// grant.
    fn use_buffer(&mut self, grant: GrantId, target: &Target, bytes: &mut u64) {
        let mut pieces = core::mem::take(&mut self.scratch);
        pieces.clear();
        if let Some(grant) = self.oracle.get(grant) {
            pieces.extend(grant.pieces());
        }
        *bytes = pieces.iter().map(IovaRange::bytes).sum();
        let mut port = CheckedBus {
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
            Passive.on(&DriverEvent::Unmapping(piece), &mut port);
        }
        self.scratch = pieces;
    }

    #[inline]
    fn attack(&mut self, event: &DriverEvent) {
        let mut port = CheckedBus {
            machine: &mut self.machine,
            oracle: &mut self.oracle,
            rows: &self.rows,
            accesses: 0,
        };
        self.attacker.on(event, &mut port);
        self.outcomes.attempts += port.accesses;
    }

    /// Makes the maps of a run visible to the device, before the driver rings the doorbell.
    fn doorbell(&mut self, device: DeviceIndex, cpu: u16, direction: Direction) {
        if let (Some(Some(attached)), Some(own)) = (
            self.attached.get(device.index()),
            self.cpus.get_mut(usize::from(cpu)),
        ) {
            let at = attached.for_direction(direction);
            self.dma.sync_map(own, &mut self.machine, at);
        }
    }

    /// Ends the replay. Closes open windows at the current time, drains the space's cache, and
    /// unmaps the live mappings without counting them.
    pub fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes {
        for (place, waiting) in self.stalled.clear().into_iter().enumerate() {
            self.outcomes.stalled_out += waiting;
            if waiting > 0 {
                self.outcomes.ring(place).stalled_out += waiting;
            }
        }
        self.outcomes.tally = self.oracle.tally;
        self.outcomes.invalidations = self.machine.invalidations();
        self.outcomes.hardware = self.machine.stats();
        self.outcomes.traffic = self.machine.traffic();
        self.outcomes.table_bytes = self.machine.table_bytes().1;
        self.outcomes.alive_at_end = self.live;
        self.outcomes.not_flushed = self.withheld.len() as u64;
        let now = self.machine.now;
        let open = self.windows.clone();
        self.windows.finish(now);
        self.outcomes.stale_max_ns = self.windows.longest_ns;
        self.outcomes.stale_byte_seconds = self.windows.byte_seconds();
        let (kept, byte_ns) = self.windows.kept_at_end;
        self.outcomes.kept_at_end = kept;
        self.outcomes.kept_byte_seconds = byte_ns as f64 / 1e9;
        let attempts = self.outcomes.attempts;
        self.outcomes.exposure = self.drain(open);
        self.outcomes.attempts = attempts;
        for (id, device) in alive {
            self.unmap(*id, *device, 0, false);
        }
        self.outcomes.clone()
    }
}
