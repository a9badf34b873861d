//! The hooks of an oracle replay: devices and attackers access memory, and the oracle judges.

use std::collections::HashMap;

use ringfence_devices::{Attacker, DeviceMapping, DriverEvent, Passive};
use ringfence_dma::{MapError, NotInvalidated};
use ringfence_trace::{DeviceIndex, MappingId, TraceDevice};
use ringfence_types::{
    Direction, DomainId, Iova, IovaRange, Nanos, PageSize, PfnRange, PhysRange, RequesterId,
};

use super::access_and_unmap::Unmapping;
use super::search::Search;
use crate::error::LabError;
use crate::hardware::Hardware;
use crate::layer::{DmaOps, MappingToken, OpKey, SpaceTraits, UnmapOutcome};
use crate::limits::ReplayLimits;
use crate::oracle::{GrantId, Oracle, Ownership, Windows};
use crate::plan::Plan;
use crate::reached::with_copies;
use crate::replay::bus::CheckedBus;
use crate::replay::hooks::{MapStep, ReplayHooks};
use crate::replay::oracle_observer::DeviceIndexTable;
use crate::replay::stalled::ring_number;
use crate::replay::{Attackers, Outcomes};
use crate::replay_platform::SharedPlatform;

/// A device of the trace.
#[derive(Debug, Clone)]
struct KnownDevice {
    /// Its requester ID in the trace.
    recorded: RequesterId,
    name: String,
    /// Its requester ID and its domain; `None` before its first map.
    attached: Option<(RequesterId, DomainId)>,
}

/// The oracle with all that it observes.
pub(super) struct OracleHooks<H> {
    platform: SharedPlatform<H>,
    pub(super) now: Nanos,
    pub(super) traits: SpaceTraits,
    devices: Vec<Option<KnownDevice>>,
    /// Number of attached devices.
    attached: usize,
    pub(super) oracle: Oracle,
    /// True if maps install translations that an invalidation can remove.
    pub(super) installs: bool,
    device_indices: DeviceIndexTable,
    pub(super) windows: Windows,
    /// Unmapped buffers that the layer withholds: the time of the unmap, and the direction.
    pub(super) withheld: HashMap<u64, (Nanos, Direction)>,
    /// Buffers that the end of a burst returned.
    pub(super) returned: Vec<u64>,
    /// Mappings whose invalidation failed. The layer withholds their buffers until it succeeds.
    pub(super) not_invalidated: Vec<NotInvalidated<u64>>,
    attackers: Attackers,
    pub(super) live: u64,
    /// Devices with a pool.
    pub(super) copying: Vec<DeviceIndex>,
    pub(super) search: Search,
    /// True if the device also accesses each page of a buffer right after its map.
    pub(super) early: bool,
    /// False after the trace: unmaps neither count nor access memory.
    pub(super) counts: bool,
    scratch: Vec<IovaRange>,
    /// IOVA ranges of the current mapping: one, or one for each segment if segments have separate
    /// ranges.
    pub(super) device_ranges: Vec<IovaRange>,
    pub(super) unmapping: Option<Unmapping>,
    pub(super) outcomes: Outcomes,
    pub(super) limits: ReplayLimits,
}

impl<H: Hardware> OracleHooks<H> {
    pub(super) fn new(
        platform: SharedPlatform<H>,
        traits: SpaceTraits,
        ownership: Ownership,
        attackers: Attackers,
    ) -> Self {
        let mut oracle = Oracle::new(ownership);
        oracle.set_lends(traits.lends);
        Self {
            platform,
            now: Nanos(0),
            traits,
            devices: Vec::new(),
            attached: 0,
            oracle,
            installs: ownership != Ownership::Byte,
            device_indices: DeviceIndexTable::default(),
            windows: Windows::default(),
            withheld: HashMap::new(),
            returned: Vec::new(),
            not_invalidated: Vec::new(),
            attackers,
            live: 0,
            copying: Vec::new(),
            search: Search::default(),
            early: false,
            counts: true,
            scratch: Vec::new(),
            device_ranges: Vec::new(),
            unmapping: None,
            outcomes: Outcomes::default(),
            limits: ReplayLimits::default(),
        }
    }

    pub(super) fn set_limits(&mut self, limits: ReplayLimits) {
        self.limits = limits;
        self.oracle.set_max_sharers(limits.buffers_on_a_page);
    }

    /// Notes the ID and the name of a device in the trace.
    pub(super) fn announce(&mut self, index: DeviceIndex, device: Option<&TraceDevice>) {
        if self.devices.len() <= index.index() {
            self.devices.resize(index.index() + 1, None);
        }
        self.devices[index.index()].get_or_insert_with(|| KnownDevice {
            recorded: device.map_or(RequesterId::new(index.0), |device| device.id),
            name: device.map_or_else(String::new, |device| device.name.clone()),
            attached: None,
        });
    }

    /// Returns the requester ID and the domain of an attached device.
    #[inline]
    pub(super) fn identity(&self, device: DeviceIndex) -> Option<(RequesterId, DomainId)> {
        self.devices.get(device.index())?.as_ref()?.attached
    }

    /// Counts what the trace left behind. `waiting` are the waiting maps of each ring.
    pub(super) fn end_trace(&mut self, waiting: Vec<u64>) {
        for (ring, waiting) in waiting.into_iter().enumerate() {
            self.outcomes.stalled_out += waiting;
            if waiting > 0 {
                self.outcomes.ring(ring).stalled_out += waiting;
            }
        }
        let outcomes = &mut self.outcomes;
        outcomes.tally = self.oracle.tally;
        let platform = self.platform.borrow();
        outcomes.invalidations = platform.invalidations();
        outcomes.hardware = platform.stats();
        outcomes.traffic = platform.traffic();
        outcomes.table_bytes = platform.table_bytes().1;
        outcomes.alive_at_end = self.live;
        outcomes.not_flushed = self.withheld.len() as u64;
        outcomes.stale_bytes = self.windows.timeline.until(self.now);
        self.windows.finish(self.now);
        outcomes.stale_max_ns = self.windows.longest_ns;
        outcomes.stale_byte_seconds = self.windows.byte_seconds();
        let (kept, byte_ns) = self.windows.kept_at_end;
        outcomes.kept_at_end = kept;
        outcomes.kept_byte_seconds = byte_ns as f64 / 1e9;
    }

    /// Returns true if the segments of a list have separate IOVA ranges.
    pub(super) fn is_per_segment(&self) -> bool {
        self.installs && !self.traits.contiguous_sg
    }

    #[inline]
    pub(super) fn close_windows(&mut self) {
        let (now, windows) = (self.now, &mut self.windows);
        let iommu = &mut self.platform.borrow_mut().iommu;
        iommu.each_completed(|request| windows.close(&request, now));
    }

    /// Reports the driver's operation on the current mapping to the attackers.
    pub(super) fn attack_event(
        &mut self,
        event: fn(DeviceMapping) -> DriverEvent,
        device: RequesterId,
        direction: Direction,
    ) {
        let ranges = core::mem::take(&mut self.device_ranges);
        for range in &ranges {
            self.attack(&event(DeviceMapping {
                device,
                range: *range,
                direction,
            }));
        }
        self.device_ranges = ranges;
    }

    #[inline]
    pub(super) fn attack(&mut self, event: &DriverEvent) {
        let mut port = CheckedBus {
            machine: &mut self.platform.borrow_mut(),
            oracle: &mut self.oracle,
            device_indices: &self.device_indices,
            accesses: 0,
        };
        self.attackers.on(event, &mut port);
        self.outcomes.attempts += port.accesses;
    }

    /// Accesses each page of the buffer once, in its direction. Returns the size of the grant.
    pub(super) fn use_buffer(&mut self, grant: GrantId, target: &DeviceMapping) -> u64 {
        let mut pieces = core::mem::take(&mut self.scratch);
        pieces.clear();
        if let Some(grant) = self.oracle.get(grant) {
            pieces.extend(grant.pieces());
        }
        let bytes = pieces.iter().map(IovaRange::bytes).sum();
        let mut port = CheckedBus {
            machine: &mut self.platform.borrow_mut(),
            oracle: &mut self.oracle,
            device_indices: &self.device_indices,
            accesses: 0,
        };
        for range in &pieces {
            let piece = DeviceMapping {
                range: *range,
                ..*target
            };
            Passive.on(&DriverEvent::Unmapping(piece), &mut port);
        }
        self.scratch = pieces;
        bytes
    }

    /// Grants the device the pages or bytes of a new mapping, and sets `device_ranges`.
    fn grant<D: DmaOps + ?Sized>(
        &mut self,
        layer: &D,
        domain: DomainId,
        map: MapStep<'_>,
        token: &MappingToken,
    ) -> Result<GrantId, LabError> {
        let MapStep { key, pieces, .. } = map;
        let (row, direction) = (key.device.index(), key.direction);
        let caches = self.traits.caches_unmapped;
        self.device_ranges.clear();
        if !self.is_per_segment() {
            // With identity addresses, the range of the first segment represents the list.
            let alone =
                |piece: &PhysRange| IovaRange::new(Iova::new(piece.start().get()), piece.bytes());
            let range = token.range().or_else(|| pieces.first().and_then(alone));
            let range = range.ok_or(LabError::Internal("mapping without range"))?;
            self.device_ranges.push(range);
            if let Some(shadow) = layer.shadow(key, range) {
                if self.traits.lends {
                    return Ok(self.oracle.grant(row, range, &[shadow], direction));
                }
                let copies = copies_of(pieces, shadow)?;
                return Ok(self.oracle.grant(row, range, &copies, direction));
            }
            let parts = layer.copied_parts(key, range);
            if let (false, Some(pool)) = (parts.is_empty(), layer.copies(key.device)) {
                let reached = with_copies(pieces, range, &parts, pool.memory)?;
                return Ok(self.oracle.grant(row, range, &reached, direction));
            }
            return Ok(self.oracle.grant(row, range, pieces, direction));
        }
        match token {
            MappingToken::Single(mapping) => self.device_ranges.push(mapping.range()),
            MappingToken::List(list) if caches => self.device_ranges.extend(list.piece_ranges()),
            _ => {
                let segments = layer.segments().iter().take(pieces.len());
                self.device_ranges
                    .extend(segments.map(|segment| segment.range));
            }
        }
        let ranges = &self.device_ranges;
        if caches {
            for range in ranges {
                self.windows
                    .reuse(domain, PfnRange::covering(range), self.now);
            }
        }
        Ok(self
            .oracle
            .grant_per_segment(row, ranges, pieces, direction))
    }

    /// Returns the number of bytes, of the `bytes` bytes of the buffer at `device_ranges`, in place
    /// of which the device uses memory of its pool.
    #[inline]
    pub(super) fn pooled_bytes<D: DmaOps + ?Sized>(
        &self,
        layer: &D,
        key: OpKey,
        bytes: u64,
    ) -> u64 {
        let mut ranges = self.device_ranges.iter();
        if ranges.any(|range| layer.shadow(key, *range).is_some()) {
            return bytes;
        }
        let parts = self
            .device_ranges
            .iter()
            .flat_map(|range| layer.copied_parts(key, *range));
        parts.map(|(_, copy)| copy.bytes()).sum()
    }

    /// Fails if a page has more buffers than the oracle can judge.
    #[inline]
    fn check_page(&self, device: DeviceIndex) -> Result<(), LabError> {
        let Some(page) = self.oracle.crowded() else {
            return Ok(());
        };
        let device = self.devices.get(device.index()).and_then(Option::as_ref);
        Err(LabError::CrowdedPage {
            device: device.map_or_else(String::new, |device| device.name.clone()),
            page,
            limit: self.limits.buffers_on_a_page,
        })
    }
}

/// Returns the memory that a device reaches in place of `pieces`, which lie at consecutive pages of
/// `shadow`.
fn copies_of(pieces: &[PhysRange], shadow: PhysRange) -> Result<Vec<PhysRange>, LabError> {
    let mut page = shadow.start().align_down(PageSize::Size4K.bytes());
    let copy = |piece: &PhysRange| {
        let start = page.wrapping_add(piece.start().offset_in(PageSize::Size4K.bytes()));
        page = page.wrapping_add(piece.pages(PageSize::Size4K) << PageSize::Size4K.shift());
        PhysRange::new(start, piece.bytes()).filter(|copy| shadow.contains(copy))
    };
    let copies: Option<Vec<PhysRange>> = pieces.iter().map(copy).collect();
    copies.ok_or(LabError::Internal("a copy outside its shadow"))
}

impl<H: Hardware> ReplayHooks for OracleHooks<H> {
    fn begin_step(&mut self, time: Nanos) {
        self.now = time;
    }

    fn end_step(&mut self) {
        self.close_windows();
    }

    /// Attaches the device at its first map, and directs its accesses to its table.
    fn attach<D: DmaOps + ?Sized>(
        &mut self,
        layer: &mut D,
        index: DeviceIndex,
    ) -> Result<(), LabError> {
        let Some(Some(device)) = self.devices.get_mut(index.index()) else {
            return Err(LabError::Internal("device"));
        };
        if device.attached.is_some() {
            return Ok(());
        }
        let id = H::requester(self.attached, device.recorded)?;
        let (domain, target) = layer.attach(index, id)?;
        if let Some(pool) = layer.copies(index) {
            self.oracle.set_pool(index.index(), pool.memory);
            self.copying.push(index);
        }
        let mut platform = self.platform.borrow_mut();
        platform.attach(id, domain, target)?;
        self.device_indices.set(id, index.0);
        device.attached = Some((id, domain));
        self.attached += 1;
        Ok(())
    }

    /// The DMA layer carries the grant ID as the buffer. The oracle can add the grant only once the
    /// addresses are known, so this takes its ID in advance.
    fn buffer(&mut self, _id: MappingId) -> u64 {
        self.oracle.next()
    }

    fn mapped<D: DmaOps + ?Sized>(
        &mut self,
        layer: &D,
        map: MapStep<'_>,
        token: &MappingToken,
        steps: u32,
    ) -> Result<(), LabError> {
        let OpKey {
            device, direction, ..
        } = map.key;
        let (id, domain) = self
            .identity(device)
            .ok_or(LabError::Internal("attachment"))?;
        let grant = self.grant(layer, domain, map, token)?;
        debug_assert_eq!(Some(grant.to_raw()), token.buffer());
        self.live += 1;
        let bytes: u64 = map.pieces.iter().map(PhysRange::bytes).sum();
        let copied = match direction {
            Direction::FromDevice => 0,
            _ => self.pooled_bytes(layer, map.key, bytes),
        };
        let outcomes = &mut self.outcomes;
        outcomes.maps += 1;
        outcomes.mapped_bytes = outcomes.mapped_bytes.saturating_add(bytes);
        outcomes.copied_bytes = outcomes.copied_bytes.saturating_add(copied);
        outcomes.live_max = outcomes.live_max.max(self.live);
        outcomes.search_steps += u64::from(steps);
        outcomes.search_max = outcomes.search_max.max(steps);
        let kept = self.windows.kept();
        self.search
            .mapped(&self.device_ranges, steps, kept, &self.limits)?;
        self.attack_event(DriverEvent::Mapped, id, direction);
        if let Some(range) = self.device_ranges.first() {
            self.platform.borrow_mut().mapped(id, range);
        }
        if self.early
            && let Some(range) = self.device_ranges.first().copied()
        {
            let target = DeviceMapping {
                device: id,
                range,
                direction,
            };
            self.use_buffer(grant, &target);
        }
        self.check_page(device)
    }

    fn refused(&mut self, key: OpKey, error: MapError) -> Result<(), LabError> {
        self.outcomes.refused_maps += 1;
        let ring = ring_number(key.device, key.direction);
        self.outcomes.ring(ring).refused += 1;
        self.outcomes.first_refusal.get_or_insert(error);
        let kept = self.windows.kept();
        self.search.refused(kept, &self.limits)
    }

    fn stalled(&mut self, key: OpKey) {
        let ring = ring_number(key.device, key.direction);
        self.outcomes.stalls += 1;
        self.outcomes.ring(ring).stalls += 1;
    }

    fn stalled_out(&mut self, key: OpKey) {
        let ring = ring_number(key.device, key.direction);
        self.outcomes.stalled_out += 1;
        self.outcomes.ring(ring).stalled_out += 1;
    }

    fn unmapping<D: DmaOps + ?Sized>(&mut self, layer: &D, key: OpKey, token: &MappingToken) {
        self.begin_unmapping(key, token);
        if self.counts {
            self.note_pooled_bytes(layer, key);
        }
    }

    fn unmapped<D: DmaOps + ?Sized>(
        &mut self,
        _layer: &D,
        key: OpKey,
        outcome: UnmapOutcome,
    ) -> Result<(), LabError> {
        self.end_unmapping(key, outcome)
    }

    fn returned(&mut self) -> Option<&mut Vec<u64>> {
        Some(&mut self.returned)
    }

    fn burst_ended(&mut self) {
        let mut returned = core::mem::take(&mut self.returned);
        for buffer in returned.drain(..) {
            self.return_buffer(buffer);
        }
        self.returned = returned;
    }

    /// Skips ticks that only the cycles of other modes require: they would add attacks.
    fn takes_tick<D: DmaOps + ?Sized>(&self, _layer: &D, plan: &Plan, time: Nanos) -> bool {
        self.traits.caches_unmapped || plan.quiet.binary_search(&time).is_err()
    }

    /// A failed flush shows as stale windows that stay open.
    fn ticked<D: DmaOps + ?Sized>(&mut self, layer: &mut D) {
        if !self.not_invalidated.is_empty() {
            self.retry_invalidations(layer);
        }
        self.attack(&DriverEvent::Other);
    }
}
