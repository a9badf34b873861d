//! The IOMMUs of a replay: VT-d walks radix tables behind context entries, Calgary one flat table
//! for each host bridge, rIOMMU the rings of a device.

mod family;

use std::fmt;
use std::rc::Rc;

use ringfence_devices::{Bus, DmaRequest, Observer};
use ringfence_hw::{
    CalgaryUnit, FaultLog, Geometry, GeometryError, HostBridge, InvalidationGranularity,
    IommuStats, Prefetch, Replacement, RingLogic, RingUnit, RingUnitConfig, TranslationCompletion,
    TranslationService, UnitConfig, VtdUnit,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    CalgaryTce, Coherency, Context, ContextTables, Levels, PageRequests, TranslationType,
};
use ringfence_types::{
    Access, DomainId, Fault, Invalidation, InvalidationError, Invalidator, Iova, IovaRange,
    PfnRange, PhysAddr, PhysRange, RequesterId,
};

use crate::error::LabError;
use crate::layer::{ContextTarget, TimedInvalidationQueue};
use crate::queue_stats::QueueStats;
use crate::{IotlbPrefetch, Profile};

pub use family::FamilyIommu;

/// An IOMMU with the structures that it reads to find a device's table.
pub trait Hardware: fmt::Debug + Sized + 'static {
    /// The owner of the tables.
    type Host: Host;
    /// The layer's interface for invalidations.
    type Invalidator: Invalidator;

    /// Creates the unit that `profile` describes, on a platform with this memory.
    ///
    /// # Errors
    /// A cache geometry is invalid, or the context tables cannot be allocated.
    fn new(
        profile: &Profile,
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError>;

    /// Turns translation off: all accesses pass through.
    fn disable(&mut self);

    /// Returns the requester ID of a device that is attached after `attached` others; `recorded` is
    /// its ID in the trace.
    ///
    /// # Errors
    /// The hardware cannot have so many devices.
    fn requester(_attached: usize, recorded: RequesterId) -> Result<RequesterId, LabError> {
        Ok(recorded)
    }

    /// Directs the accesses of `device` to the target `to`.
    ///
    /// # Errors
    /// The context tables cannot be allocated, or the hardware does not support the target.
    fn attach(
        &mut self,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError>;

    /// Removes the context of `device` and invalidates its cached copy.
    ///
    /// # Errors
    /// The context tables are malformed, or the invalidation failed.
    fn detach(&mut self, memory: &Arena, device: RequesterId) -> Result<(), LabError>;

    /// Translates an access without moving bytes, and reports it to `observer`.
    ///
    /// # Errors
    /// The fault that stopped the access.
    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        observer: O,
    ) -> Result<(), Fault>;

    /// Passes the unit a hint: a driver has mapped `range` for `device`. A unit without prefetch
    /// ignores it.
    fn mapped(&mut self, memory: &Arena, device: RequesterId, range: &IovaRange) {
        let _ = (memory, device, range);
    }

    /// Returns the interface for the layer's invalidations.
    fn invalidator(&mut self) -> &mut Self::Invalidator;

    /// Returns the hardware's counters.
    fn stats(&self) -> IommuStats;

    /// Returns the host that owns the tables; `None` if the layer owns them.
    fn host(&self) -> Option<&Self::Host> {
        None
    }

    /// Invalidates all caches, independently of the layer's state.
    ///
    /// # Errors
    /// The invalidation failed; cached translations may remain.
    fn invalidate_all(&mut self) -> Result<(), InvalidationError> {
        self.invalidator().submit(Invalidation::Global).map(drop)
    }

    /// Appends to `completed` the invalidations that the host completed since the last call.
    fn drain_completed(&mut self, completed: &mut Vec<Invalidation>) {
        let _ = completed;
    }

    /// Returns the counters of the queue to the host.
    fn traffic(&self) -> QueueStats {
        QueueStats::default()
    }

    /// Returns the counters of the fault log.
    fn fault_counts(&mut self) -> FaultCounts;

    /// Requests the host address of `iova`, as a device with a device TLB does. `None` if the unit
    /// does not give it.
    fn translation_request(
        &mut self,
        memory: &Arena,
        device: RequesterId,
        iova: Iova,
    ) -> Option<PhysAddr> {
        let _ = (memory, device, iova);
        None
    }

    /// Makes an access to a host address, as a device with a device TLB does. Returns true if the
    /// unit permits it.
    fn translated_request(
        &mut self,
        memory: &Arena,
        device: RequesterId,
        reached: PhysRange,
        access: Access,
    ) -> bool {
        let _ = (memory, device, reached, access);
        false
    }
}

/// The counters of a fault log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Faults that software can read from the log.
    pub recorded: u64,
    /// Faults that the full log lost.
    pub lost: u64,
}

impl FaultCounts {
    pub(crate) fn of(log: &FaultLog) -> Self {
        Self {
            recorded: log.len() as u64,
            lost: log.lost(),
        }
    }
}

/// The owner of the tables that the hardware walks: the layer itself ([`()`](unit)), or a host that
/// the layer sends requests to.
pub trait Host: Clone + 'static {
    /// True if the owner is a host.
    const REMOTE: bool;
    /// The layer's interface for waiting for an invalidation in timed replays.
    type Invalidator: Invalidator + 'static;

    /// Creates the host and the invalidator of a timed replay whose layer keeps its state in
    /// `memory`.
    ///
    /// # Errors
    /// Memory is short.
    fn for_meter(
        memory: &Rc<Arena>,
        coherency: Coherency,
    ) -> Result<(Option<Self>, Self::Invalidator), LabError>;
}

impl Host for () {
    const REMOTE: bool = false;
    type Invalidator = TimedInvalidationQueue;

    fn for_meter(
        memory: &Rc<Arena>,
        _: Coherency,
    ) -> Result<(Option<Self>, TimedInvalidationQueue), LabError> {
        Ok((None, TimedInvalidationQueue::in_first_frames(memory)))
    }
}

/// A VT-d unit with its root and context tables.
#[derive(Debug)]
pub struct Vtd {
    /// The modelled unit.
    pub unit: VtdUnit,
    contexts: ContextTables,
    /// True if the unit prefetches the pages of each map.
    hinted: bool,
}

impl Hardware for Vtd {
    type Host = ();
    type Invalidator = VtdUnit;

    fn new(
        profile: &Profile,
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError> {
        let contexts = ContextTables::new(profile.coherency(), &**memory, &**frames)?;
        let mut unit = VtdUnit::vtd(&config(profile)?);
        unit.set_adjacent_prefetch(profile.iotlb_prefetch.adjacent());
        // Only the tables of modes with larger pages contain the hint.
        unit.set_contiguous_hint(true);
        unit.set_root_table(contexts.root());
        unit.enable();
        Ok(Self {
            unit,
            contexts,
            hinted: profile.iotlb_prefetch == IotlbPrefetch::HintAtMap,
        })
    }

    fn disable(&mut self) {
        self.unit.disable();
    }

    fn mapped(&mut self, memory: &Arena, device: RequesterId, range: &IovaRange) {
        if self.hinted {
            self.unit
                .prefetch(memory, device, &PfnRange::covering(range));
        }
    }

    fn attach(
        &mut self,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        let levels = Levels::Four;
        let translation = match to {
            ContextTarget::Table(root) => TranslationType::Table { root, levels },
            ContextTarget::DeviceTlb(root) => TranslationType::DeviceTlb {
                root,
                levels,
                page_requests: PageRequests::Blocked,
            },
            ContextTarget::PassThrough => TranslationType::PassThrough { levels },
        };
        let context = Context {
            domain,
            translation,
        };
        Ok(self.contexts.attach(memory, frames, device, &context)?)
    }

    fn detach(&mut self, memory: &Arena, device: RequesterId) -> Result<(), LabError> {
        let detached = self.contexts.detach(memory, device);
        detached.map_err(|_| LabError::Internal("a malformed context table"))?;
        self.unit.invalidate(&Invalidation::Context(device));
        Ok(())
    }

    #[inline]
    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        observer: O,
    ) -> Result<(), Fault> {
        Bus::new(&mut self.unit, memory, observer).probe(request)
    }

    #[inline]
    fn invalidator(&mut self) -> &mut VtdUnit {
        &mut self.unit
    }

    fn stats(&self) -> IommuStats {
        *self.unit.stats()
    }

    fn translation_request(
        &mut self,
        memory: &Arena,
        device: RequesterId,
        iova: Iova,
    ) -> Option<PhysAddr> {
        match self.unit.translation_request(memory, device, iova) {
            TranslationCompletion::Page { base, size, .. } => {
                Some(base.wrapping_add(iova.offset_in(size.bytes())))
            }
            _ => None,
        }
    }

    fn translated_request(
        &mut self,
        memory: &Arena,
        device: RequesterId,
        reached: PhysRange,
        access: Access,
    ) -> bool {
        let (at, bytes) = (reached.start(), reached.bytes());
        self.unit
            .translated_request(memory, device, at, bytes, access)
            .is_ok()
    }

    fn fault_counts(&mut self) -> FaultCounts {
        FaultCounts::of(self.unit.faults())
    }
}

/// A Calgary unit with one host bridge for each device. A bridge has one address space for all
/// devices behind it (CG02), and a replay gives each device its own space. The unit only
/// invalidates globally, like the Linux driver (`tce_cache_blast` in
/// `arch/x86/kernel/pci-calgary_64.c`; HW07).
#[derive(Debug)]
pub struct Calgary {
    unit: CalgaryUnit,
}

impl Calgary {
    /// Removes the table of the host bridge above `bus`.
    pub fn detach(&mut self, bus: u8) {
        self.unit.clear_bridge(bus);
    }
}

impl Hardware for Calgary {
    type Host = ();
    type Invalidator = CalgaryUnit;

    fn new(
        profile: &Profile,
        _memory: &Rc<Arena>,
        _frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError> {
        let config = UnitConfig {
            granularity: InvalidationGranularity::GlobalOnly,
            ..config(profile)?
        };
        let mut unit = CalgaryUnit::calgary(&config);
        unit.enable();
        Ok(Self { unit })
    }

    fn disable(&mut self) {
        self.unit.disable();
    }

    /// Gives each device the next bus.
    fn requester(attached: usize, _recorded: RequesterId) -> Result<RequesterId, LabError> {
        match u8::try_from(attached) {
            Ok(bus) => Ok(RequesterId::new(u16::from(bus) << 8)),
            Err(_) => Err(LabError::TooFewBuses { limit: 256 }),
        }
    }

    fn attach(
        &mut self,
        _memory: &Arena,
        _frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        let table = match to {
            ContextTarget::Table(table) => table,
            ContextTarget::DeviceTlb(_) => return Err(LabError::NoDeviceTlb),
            ContextTarget::PassThrough => {
                return Err(LabError::Internal("a host bridge without a table"));
            }
        };
        self.unit.set_bridge(HostBridge {
            first_bus: device.bus(),
            last_bus: device.bus(),
            domain,
            format: CalgaryTce::FULL,
            table,
        });
        Ok(())
    }

    /// The unit invalidates all entries of the space with its bridge.
    fn detach(&mut self, _: &Arena, device: RequesterId) -> Result<(), LabError> {
        self.unit.clear_bridge(device.bus());
        Ok(())
    }

    #[inline]
    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        observer: O,
    ) -> Result<(), Fault> {
        Bus::new(&mut self.unit, memory, observer).probe(request)
    }

    #[inline]
    fn invalidator(&mut self) -> &mut CalgaryUnit {
        &mut self.unit
    }

    fn stats(&self) -> IommuStats {
        *self.unit.stats()
    }

    fn fault_counts(&mut self) -> FaultCounts {
        FaultCounts::of(self.unit.faults())
    }
}

/// A ring unit with its root and context tables.
#[derive(Debug)]
pub struct Riommu<L: RingLogic> {
    unit: RingUnit<L>,
    contexts: ContextTables,
}

impl<L: RingLogic + 'static> Hardware for Riommu<L> {
    type Host = ();
    type Invalidator = RingUnit<L>;

    /// The rIOMMU paper gives each ring one entry and does not state the number of rings. Here the
    /// rIOTLB has the number of entries and the geometry of the profile's IOTLB.
    fn new(
        profile: &Profile,
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError> {
        let contexts = ContextTables::new(profile.coherency(), &**memory, &**frames)?;
        let mut unit = RingUnit::new(&RingUnitConfig {
            riotlb: Geometry::new(profile.iotlb_sets, profile.iotlb_ways)?,
            replacement: Replacement::Lru,
            contexts: Geometry::new(64, 1)?,
            prefetch: Prefetch::Immediate,
            fault_log: FaultLog::MAX_CAPACITY,
        });
        unit.set_root_table(contexts.root());
        unit.enable();
        Ok(Self { unit, contexts })
    }

    fn disable(&mut self) {
        self.unit.disable();
    }

    fn attach(
        &mut self,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        let rings = match to {
            ContextTarget::Table(rings) => rings,
            ContextTarget::DeviceTlb(_) => return Err(LabError::NoDeviceTlb),
            ContextTarget::PassThrough => {
                return Err(LabError::Internal("a ring unit without rings"));
            }
        };
        let translation = TranslationType::Rings { device: rings };
        let context = Context {
            domain,
            translation,
        };
        Ok(self.contexts.attach(memory, frames, device, &context)?)
    }

    fn detach(&mut self, memory: &Arena, device: RequesterId) -> Result<(), LabError> {
        let detached = self.contexts.detach(memory, device);
        detached.map_err(|_| LabError::Internal("a malformed context table"))?;
        let invalidated = self.unit.submit(Invalidation::Context(device));
        invalidated
            .map(drop)
            .map_err(|_| LabError::Internal("an invalidation that fails"))
    }

    #[inline]
    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        observer: O,
    ) -> Result<(), Fault> {
        Bus::new(&mut self.unit, memory, observer).probe(request)
    }

    #[inline]
    fn invalidator(&mut self) -> &mut RingUnit<L> {
        &mut self.unit
    }

    /// Converts ring counters to those of a unit with tables. A hit is an access that read no
    /// table. A miss read the rPTE and, if the ring had no entry, first the rRING.
    fn stats(&self) -> IommuStats {
        let ring = self.unit.stats();
        let mut stats = IommuStats::default();
        stats.iotlb_hits = ring.hits + ring.prefetch_hits;
        stats.iotlb_misses = ring.slot_walks + ring.misses;
        stats.iotlb_evictions = ring.evictions;
        stats.walk_references = 2 * (ring.slot_walks + 2 * ring.misses);
        stats.context_misses = ring.context_misses;
        stats.passed_through = ring.passed_through;
        stats.invalidations = ring.invalidations;
        stats.faults = ring.faults;
        stats
    }

    fn fault_counts(&mut self) -> FaultCounts {
        FaultCounts::of(self.unit.faults())
    }
}

/// Returns the cache geometry of a profile.
fn config(profile: &Profile) -> Result<UnitConfig, GeometryError> {
    let fully = |entries: u32| match entries {
        0 => Ok(Geometry::ABSENT),
        _ => Geometry::new(1, entries),
    };
    let [one, two, three] = profile.walk_cache_entries;
    Ok(UnitConfig {
        iotlb: Geometry::new(profile.iotlb_sets, profile.iotlb_ways)?,
        walk_caches: [fully(one)?, fully(two)?, fully(three)?],
        contexts: Geometry::new(64, 1)?,
        ..UnitConfig::UNCACHED
    })
}

#[cfg(test)]
mod tests;
