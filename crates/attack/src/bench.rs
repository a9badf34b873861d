//! The driver, the devices and the oracle around the layer and the hardware of one mode.

mod access;
mod claims;
mod drivers;

pub(crate) use access::access_of;
pub(crate) use claims::ClaimOutcome;

use ringfence_lab::LabError;
use ringfence_lab::compare::{CompareOptions, non_coherent_testbed, testbed};
use ringfence_lab::layer::{
    ContextTarget, DmaOps, MappingToken, OpKey, Refusal, SpaceTraits, UnmapOutcome,
};
use ringfence_lab::modes::Mode;
use ringfence_lab::oracle::{ByteGrantId, ByteOracle};
use ringfence_lab::reached::with_copies;
use ringfence_lab::ring::RingSizes;
use ringfence_lab::testbed::{Machine, Testbed};
use ringfence_memory::Arena;
use ringfence_trace::DeviceIndex;
use ringfence_types::{Direction, DomainId, IovaRange, Nanos, PhysAddr, PhysRange, RequesterId};

use crate::evidence::Evidence;

/// CPUs of a bench.
const CPUS: usize = 2;
/// Devices of a bench: the victim and the attacker's own.
pub(crate) const DEVICES: u16 = 2;
/// Slots of every ring, unless a scenario needs another number.
pub(crate) const SLOTS: u32 = 512;

/// Pages of a 32-bit space.
pub(crate) const PAGES_32_BIT: u64 = 1 << 20;

/// Identifies a mapping of a bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MapId(usize);

struct Held {
    token: MappingToken,
    key: OpKey,
    range: IovaRange,
    grant: ByteGrantId,
    back: bool,
}

/// A mode under attack.
pub(crate) struct Bench {
    layer: Box<dyn DmaOps>,
    machine: Box<dyn Machine>,
    pub(crate) oracle: ByteOracle,
    now: Nanos,
    requesters: Vec<RequesterId>,
    held: Vec<Held>,
    false_faults: u64,
    targets: Vec<(DomainId, ContextTarget)>,
}

/// Returns `bytes` bytes of memory from `start`.
pub(crate) fn memory(start: u64, bytes: u64) -> Result<PhysRange, LabError> {
    PhysRange::new(PhysAddr::new(start), bytes).ok_or(LabError::Internal("an empty buffer"))
}

/// Options of a testbed with `slots` slots in every ring. Walks of its profile do not snoop.
fn options(slots: u32) -> CompareOptions {
    CompareOptions {
        rings: RingSizes::Every(slots),
        ..CompareOptions::new()
    }
}

impl Bench {
    /// Creates the bench of `mode`, with [`SLOTS`] slots in every ring.
    pub(crate) fn new(mode: &Mode) -> Result<Self, LabError> {
        Self::with_slots(mode, SLOTS)
    }

    /// Creates the bench of `mode`, with `slots` slots in every ring.
    pub(crate) fn with_slots(mode: &Mode, slots: u32) -> Result<Self, LabError> {
        Self::of(testbed(mode, &options(slots))?)
    }

    /// Creates the bench of `mode` with an IOMMU that sees only lines that were written back.
    pub(crate) fn without_snooping(mode: &Mode) -> Result<Self, LabError> {
        Self::of(non_coherent_testbed(mode, &options(SLOTS))?)
    }

    /// Creates the bench of [`without_snooping`](Self::without_snooping). Calls `prepare` with its
    /// memory before the first device gets a table.
    pub(crate) fn over_memory(
        mode: &Mode,
        prepare: impl FnOnce(&Arena) -> Result<(), LabError>,
    ) -> Result<Self, LabError> {
        let made = non_coherent_testbed(mode, &options(SLOTS))?;
        prepare(&made.machine.memory())?;
        Self::of(made)
    }

    fn of(made: Testbed) -> Result<Self, LabError> {
        let mut bench = Self {
            layer: made.layer,
            machine: made.machine,
            oracle: ByteOracle::new(),
            now: Nanos(0),
            requesters: Vec::new(),
            held: Vec::new(),
            false_faults: 0,
            targets: Vec::new(),
        };
        bench.layer.reserve(CPUS, 1)?;
        bench.oracle.set_lends(bench.layer.space_traits().lends);
        for index in 0..DEVICES {
            // Each device is on a bus of its own: a Calgary bridge has one address space for all
            // devices behind it.
            let wanted = RequesterId::new((0x10 + index) << 8);
            let device = bench.machine.requester(usize::from(index), wanted)?;
            let (domain, target) = bench.layer.attach(DeviceIndex(index), device)?;
            bench.machine.attach(device, domain, target)?;
            bench.requesters.push(device);
            bench.targets.push((domain, target));
            if let Some(pool) = bench.layer.copies(DeviceIndex(index)) {
                bench.oracle.set_pool(device, pool.memory);
            }
        }
        Ok(bench)
    }

    /// Returns the constants of the mode's spaces.
    pub(crate) fn space_traits(&self) -> SpaceTraits {
        self.layer.space_traits()
    }

    /// Returns the hardware.
    pub(crate) fn machine(&mut self) -> &mut dyn Machine {
        &mut *self.machine
    }

    /// Returns the requester ID of a device.
    pub(crate) fn requester(&self, device: u16) -> Result<RequesterId, LabError> {
        let found = self.requesters.get(usize::from(device)).copied();
        found.ok_or(LabError::Internal("an unknown device"))
    }

    /// Returns the requester ID of a function beside `device`, on its bus.
    pub(crate) fn sibling(&self, device: u16) -> Result<RequesterId, LabError> {
        Ok(RequesterId::new(self.requester(device)?.get() | 1))
    }

    /// Attaches the function beside `device` to the domain of `device`.
    pub(crate) fn attach_sibling(&mut self, device: u16) -> Result<(), LabError> {
        let sibling = self.sibling(device)?;
        let target = self.targets.get(usize::from(device)).copied();
        let (domain, target) = target.ok_or(LabError::Internal("an unknown device"))?;
        self.machine.attach(sibling, domain, target)
    }

    /// Maps a buffer for `device` on the first CPU. `None` if the layer refuses, for example
    /// because the ring is full.
    pub(crate) fn try_map(
        &mut self,
        device: u16,
        buffer: PhysRange,
        direction: Direction,
    ) -> Result<Option<MapId>, LabError> {
        let key = OpKey::new(DeviceIndex(device), 0, direction);
        let index = self.held.len();
        let Ok(mapped) = self.layer.map(key, index as u64, &[buffer]) else {
            return Ok(None);
        };
        self.layer.sync_map(key);
        let Some(range) = mapped.token.range() else {
            return Err(LabError::Internal("a single buffer without a range"));
        };
        // The memory of the copy, if the device uses one.
        let reached = match self.layer.shadow(key, range) {
            Some(copy) => vec![copy],
            None => {
                let parts = self.layer.copied_parts(key, range);
                match self.layer.copies(key.device) {
                    Some(pool) => with_copies(&[buffer], range, &parts, pool.memory)?,
                    None => vec![buffer],
                }
            }
        };
        let grant = self
            .oracle
            .grant(self.requester(device)?, &reached, direction);
        self.held.push(Held {
            token: mapped.token,
            key,
            range,
            grant,
            back: false,
        });
        Ok(Some(MapId(index)))
    }

    /// Maps a buffer for `device` on the first CPU.
    pub(crate) fn map(
        &mut self,
        device: u16,
        buffer: PhysRange,
        direction: Direction,
    ) -> Result<MapId, LabError> {
        let mapped = self.try_map(device, buffer, direction)?;
        mapped.ok_or(LabError::Internal("a map that the layer refuses"))
    }

    fn held(&self, id: MapId) -> Result<&Held, LabError> {
        let held = self.held.get(id.0);
        held.ok_or(LabError::Internal("an unknown mapping"))
    }

    /// Returns the addresses of a mapping, live or unmapped.
    pub(crate) fn range(&self, id: MapId) -> Result<IovaRange, LabError> {
        Ok(self.held(id)?.range)
    }

    /// Returns the memory that the device reaches at the start of a mapping. `None` if the driver
    /// takes no buffers from a pool.
    pub(crate) fn lent_memory(&self, id: MapId) -> Result<Option<PhysAddr>, LabError> {
        let held = self.held(id)?;
        let memory = self.layer.shadow(held.key, held.range);
        Ok(memory
            .filter(|_| self.layer.space_traits().lends)
            .map(|memory| memory.start()))
    }

    /// Returns true if the driver has the buffer back.
    pub(crate) fn is_back(&self, id: MapId) -> Result<bool, LabError> {
        Ok(self.held(id)?.back)
    }

    fn take(&mut self, id: MapId) -> Result<(OpKey, MappingToken), LabError> {
        let held = self.held.get_mut(id.0);
        let held = held.ok_or(LabError::Internal("an unknown mapping"))?;
        Ok((held.key, std::mem::take(&mut held.token)))
    }

    fn returned(&mut self, buffer: u64) -> Result<(), LabError> {
        let held = usize::try_from(buffer).ok();
        let held = held.and_then(|index| self.held.get_mut(index));
        let held = held.ok_or(LabError::Internal("an unknown buffer came back"))?;
        held.back = true;
        self.oracle.end(held.grant, self.now);
        Ok(())
    }

    /// Unmaps a buffer. A burst may withhold it.
    pub(crate) fn unmap(&mut self, id: MapId) -> Result<(), LabError> {
        self.unmap_with(id, &mut || ())
    }

    /// Unmaps a buffer. Calls `invalidated` if the unmap has completed an invalidation, before the
    /// driver has the buffer back.
    pub(crate) fn unmap_with(
        &mut self,
        id: MapId,
        invalidated: &mut dyn FnMut(),
    ) -> Result<(), LabError> {
        let (key, token) = self.take(id)?;
        let before = self.machine.invalidations();
        let outcome = self.layer.unmap(key, token);
        if self.machine.invalidations() > before {
            invalidated();
        }
        match outcome {
            UnmapOutcome::Returned { buffer, .. } => self.returned(buffer),
            UnmapOutcome::Withheld => Ok(()),
            _ => Err(LabError::Internal("an unmap that the layer refuses")),
        }
    }

    /// Unmaps a buffer as if `device` had mapped it. Returns true if the layer refuses.
    pub(crate) fn unmap_as(&mut self, id: MapId, device: u16) -> Result<bool, LabError> {
        let (key, token) = self.take(id)?;
        let key = OpKey {
            device: DeviceIndex(device),
            ..key
        };
        match self.layer.unmap(key, token) {
            UnmapOutcome::Returned { buffer, .. } => self.returned(buffer).map(|()| false),
            UnmapOutcome::Withheld => Ok(false),
            _ => Ok(true),
        }
    }

    /// Unmaps a buffer as if it were mapped in the direction `ring`, by which a mode with rings
    /// selects the ring of a device. Returns true if the layer refuses because the mapping belongs
    /// to another ring.
    pub(crate) fn unmap_in_ring(&mut self, id: MapId, ring: Direction) -> Result<bool, LabError> {
        let (key, token) = self.take(id)?;
        let key = OpKey {
            direction: ring,
            ..key
        };
        let outcome = self.layer.unmap(key, token);
        self.layer.end_burst(key, Some(&mut Vec::new()));
        Ok(matches!(
            outcome,
            UnmapOutcome::Refused(Refusal::OtherOwner)
        ))
    }

    /// Unmaps several buffers of the same device and direction in one call.
    pub(crate) fn unmap_multi(&mut self, ids: &[MapId]) -> Result<(), LabError> {
        let mut tokens = Vec::with_capacity(ids.len());
        let mut key = None;
        for id in ids {
            let (own, token) = self.take(*id)?;
            key = Some(own);
            tokens.push(token);
        }
        let Some(key) = key else {
            return Ok(());
        };
        let mut returned = Vec::new();
        if !self.layer.unmap_multi(key, tokens, &mut returned) {
            return Err(LabError::Internal("a batch that the layer refuses"));
        }
        returned
            .into_iter()
            .try_for_each(|buffer| self.returned(buffer))
    }

    /// Ends the bursts of a device's buffers.
    pub(crate) fn end_burst(&mut self, device: u16, direction: Direction) -> Result<(), LabError> {
        self.end_burst_with(device, direction, &mut || ())
    }

    /// Ends the bursts of a device's buffers. Calls `invalidated` as
    /// [`unmap_with`](Self::unmap_with) does.
    pub(crate) fn end_burst_with(
        &mut self,
        device: u16,
        direction: Direction,
        invalidated: &mut dyn FnMut(),
    ) -> Result<(), LabError> {
        let key = OpKey::new(DeviceIndex(device), 0, direction);
        let mut returned = Vec::new();
        let before = self.machine.invalidations();
        self.layer.end_burst(key, Some(&mut returned));
        if self.machine.invalidations() > before {
            invalidated();
        }
        returned
            .into_iter()
            .try_for_each(|buffer| self.returned(buffer))
    }

    /// Unmaps a buffer and ends the burst.
    pub(crate) fn release(&mut self, id: MapId) -> Result<(), LabError> {
        let key = self.held(id)?.key;
        self.unmap(id)?;
        self.end_burst(key.device.0, key.direction)
    }

    /// Advances the clock to `now`, if that is later, and runs the layer's timers.
    pub(crate) fn advance_to(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        self.machine.set_time(self.now);
        self.layer.set_time(self.now);
        self.layer.tick();
    }

    /// Returns the present time.
    pub(crate) fn now(&self) -> Nanos {
        self.now
    }

    /// Adds the false faults so far to `evidence` and resets their count.
    pub(crate) fn take_false_faults(&mut self, evidence: &mut Evidence) {
        evidence.false_faults += std::mem::take(&mut self.false_faults);
    }
}
