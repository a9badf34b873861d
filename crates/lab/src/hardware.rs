//! The IOMMU of a replay's machine: one that walks radix tables behind context entries, one flat
//! table a host bridge, or the rings of a device.

use std::fmt;
use std::rc::Rc;

use ringfence_devices::{Bus, DmaRequest, Observer};
use ringfence_hw::{
    CalgaryUnit, FaultLog, Geometry, GeometryError, HostBridge, InvalidationGranularity,
    IommuStats, Prefetch, Replacement, RingLogic, RingUnit, RingUnitConfig, UnitConfig, VtdUnit,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{CalgaryTce, Coherency, Context, ContextTables, Levels, TranslationType};
use ringfence_types::{
    DomainId, Fault, Invalidation, InvalidationError, Invalidator, PhysAddr, RequesterId,
};

use crate::Profile;
use crate::error::LabError;
use crate::guest::QueueStats;
use crate::meter::{InvalidationQueue, invalidation_queue};

/// Where a device's accesses are directed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextTarget {
    /// To the table at this root; where devices have rings, to the rDEVICE.
    Table(PhysAddr),
    /// Past all tables.
    PassThrough,
}

/// An IOMMU and what it reads to find a device's table.
pub trait Hardware: fmt::Debug + Sized + 'static {
    /// Who keeps its tables.
    type Host: Host;
    /// What the layer has it forget something by.
    type Invalidator: Invalidator;

    /// The unit that `profile` describes, for a machine with this memory.
    ///
    /// # Errors
    /// Caches of an impossible shape, or no room for what directs devices.
    fn new(
        profile: &Profile,
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError>;

    /// Lets all accesses through untranslated.
    fn disable(&mut self);

    /// The requester ID under which the device in `row` of the trace's devices makes its accesses;
    /// `recorded` is its own. `None` if the hardware has no place for so many.
    fn requester(_row: u16, recorded: RequesterId) -> Option<RequesterId> {
        Some(recorded)
    }

    /// Directs a device's accesses.
    ///
    /// # Errors
    /// No room for what directs devices, or nothing that could direct it there.
    fn attach(
        &mut self,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError>;

    /// Makes an access without moving bytes, before the eyes of `observer`.
    ///
    /// # Errors
    /// The fault that stopped it.
    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        observer: O,
    ) -> Result<(), Fault>;

    /// Where the layer's invalidations go.
    fn invalidator(&mut self) -> &mut Self::Invalidator;

    /// What it has counted.
    fn stats(&self) -> IommuStats;

    /// Who keeps the tables, if it is not the layer.
    fn host(&self) -> Option<&Self::Host> {
        None
    }

    /// Forgets all that it has cached, whatever the layer believes.
    ///
    /// # Errors
    /// It may not have.
    fn invalidate_all(&mut self) -> Result<(), InvalidationError> {
        self.invalidator().submit(Invalidation::Global).map(drop)
    }

    /// Moves the invalidations that the host had it complete since the last call to the end of
    /// `completed`.
    fn drain_completed(&mut self, completed: &mut Vec<Invalidation>) {
        let _ = completed;
    }

    /// What went through the queue to the host.
    fn traffic(&self) -> QueueStats {
        QueueStats::default()
    }
}

/// Who keeps the tables that the hardware looks up: the layer itself ([`()`](unit)), or a host that
/// it asks to.
pub trait Host: Sized + 'static {
    /// Whether it is somebody else.
    const REMOTE: bool;
    /// How the layer waits for an invalidation where time is measured.
    type Invalidator: Invalidator + 'static;

    /// One for a timed replay whose layer keeps what it keeps in `memory`.
    ///
    /// # Errors
    /// No room.
    fn for_meter(
        memory: &Rc<Arena>,
        coherency: Coherency,
    ) -> Result<(Option<Self>, Self::Invalidator), LabError>;
}

impl Host for () {
    const REMOTE: bool = false;
    type Invalidator = InvalidationQueue;

    fn for_meter(
        memory: &Rc<Arena>,
        _: Coherency,
    ) -> Result<(Option<Self>, InvalidationQueue), LabError> {
        Ok((None, invalidation_queue(memory)))
    }
}

/// A VT-d unit with its root and context tables.
#[derive(Debug)]
pub struct Vtd {
    /// The unit.
    pub unit: VtdUnit,
    contexts: ContextTables,
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
        let levels = Levels::Four;
        let translation = match to {
            ContextTarget::Table(root) => TranslationType::Table { root, levels },
            ContextTarget::PassThrough => TranslationType::PassThrough { levels },
        };
        let context = Context {
            domain,
            translation,
        };
        Ok(self.contexts.attach(memory, frames, device, &context)?)
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
}

/// A Calgary unit, every device behind a host bridge of its own: a bridge has one space for all
/// devices behind it (CG02), and a replay gives each device a space. What it purges it purges
/// whole, as Linux's driver does (`tce_cache_blast` in `arch/x86/kernel/pci-calgary_64.c`; HW07).
#[derive(Debug)]
pub struct Calgary {
    unit: CalgaryUnit,
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

    /// The row is the bus.
    fn requester(row: u16, _recorded: RequesterId) -> Option<RequesterId> {
        (row < 256).then(|| RequesterId::new(row << 8))
    }

    fn attach(
        &mut self,
        _memory: &Arena,
        _frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        let ContextTarget::Table(table) = to else {
            return Err(LabError::Internal("a host bridge without a table"));
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

    /// The documents give each ring one entry and do not say for how many: here as many rings have
    /// one as the profile's IOTLB has entries, in the same geometry.
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
        let ContextTarget::Table(rings) = to else {
            return Err(LabError::Internal("a ring unit without rings"));
        };
        let translation = TranslationType::Rings { device: rings };
        let context = Context {
            domain,
            translation,
        };
        Ok(self.contexts.attach(memory, frames, device, &context)?)
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

    /// In the words of a unit with tables: a hit is an access that read no table, a miss one that
    /// read the rPTE, and before it the rRING where the ring had no entry.
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
}

/// The caches of a profile.
fn config(profile: &Profile) -> Result<UnitConfig, GeometryError> {
    let fully = |entries: u32| Geometry::new(1, entries);
    let [one, two, three] = profile.walk_cache;
    Ok(UnitConfig {
        iotlb: Geometry::new(profile.iotlb_sets, profile.iotlb_ways)?,
        walk_caches: [fully(one)?, fully(two)?, fully(three)?],
        contexts: Geometry::new(64, 1)?,
        ..UnitConfig::UNCACHED
    })
}
