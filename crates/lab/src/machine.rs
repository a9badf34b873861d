//! The machine of a replay: memory, frames, one IOMMU, context tables, and a clock that the trace drives.

use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_hw::{Geometry, GeometryError, UnitConfig, VtdUnit};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Context, ContextTables, Levels, TableError, Translation};
use ringfence_types::{
    DeviceId, DomainId, Invalidation, InvalidationError, Invalidator, Nanos, PhysAddr, PhysRange,
    Ticket,
};

use crate::Profile;
use crate::error::LabError;

/// Where the buffers of a trace lie; traces are renamed to fit.
pub const DATA_BYTES: u64 = 64 << 30;
/// Room for tables above them: enough to map all data by 4 KiB pages several times.
const TABLE_BYTES: u64 = 4 << 30;

/// The IOMMU as the mapping layer sees it, with a list of the invalidations it has completed.
#[derive(Debug)]
pub struct Watched {
    /// The hardware.
    pub unit: VtdUnit,
    /// Completed and not yet looked at.
    pub completed: Vec<Invalidation>,
    /// All invalidations so far.
    pub count: u64,
}

impl Invalidator for Watched {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        let ticket = self.unit.submit(request)?;
        self.count += 1;
        // The unit completes what it accepts before it returns.
        self.completed.push(request);
        Ok(ticket)
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.unit.poll(ticket)
    }
}

/// Memory and hardware of one replay.
#[derive(Debug)]
pub struct Machine {
    arena: Rc<Arena>,
    frames: Frames<Rc<Arena>>,
    contexts: ContextTables,
    coherency: Coherency,
    /// The IOMMU.
    pub iommu: Watched,
    /// The time.
    pub now: Nanos,
}

/// What a device's context says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Directed {
    /// To the table at this root.
    Table(PhysAddr),
    /// Past all tables.
    PassThrough,
}

impl Machine {
    /// A machine as `profile` describes it. With `enabled` false its IOMMU is off.
    pub fn new(profile: &Profile, enabled: bool) -> Result<Self, LabError> {
        let arena = Rc::new(Arena::new(DATA_BYTES + TABLE_BYTES)?);
        let region = PhysRange::new(PhysAddr::new(DATA_BYTES), TABLE_BYTES)
            .ok_or(LabError::Internal("table region"))?;
        let frames = Frames::new(Rc::clone(&arena), region);
        let coherency = profile.coherency();
        let contexts = ContextTables::new(coherency, &*arena, &frames)?;
        let mut unit = VtdUnit::vtd(&unit_config(profile)?);
        unit.set_root_table(contexts.root());
        if enabled {
            unit.enable();
        }
        Ok(Self {
            arena,
            frames,
            contexts,
            coherency,
            iommu: Watched {
                unit,
                completed: Vec::new(),
                count: 0,
            },
            now: Nanos(0),
        })
    }

    /// Directs a device's accesses.
    pub fn attach(
        &mut self,
        device: DeviceId,
        domain: DomainId,
        to: Directed,
    ) -> Result<(), TableError> {
        let levels = Levels::Four;
        let translation = match to {
            Directed::Table(root) => Translation::Table { root, levels },
            Directed::PassThrough => Translation::PassThrough { levels },
        };
        let context = Context {
            domain,
            translation,
        };
        self.contexts
            .attach(&*self.arena, &self.frames, device, &context)
    }

    /// Whether the walker snoops.
    pub fn coherency(&self) -> Coherency {
        self.coherency
    }

    /// The memory, for use beside the hardware.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Hardware and memory, for an access.
    pub fn bus(&mut self) -> (&mut VtdUnit, &Arena) {
        (&mut self.iommu.unit, &self.arena)
    }

    /// Bytes of table frames in use and at most.
    pub fn table_bytes(&self) -> (u64, u64) {
        (self.frames.in_use() * 4096, self.frames.peak() * 4096)
    }
}

impl Platform for Machine {
    type Memory = Arena;
    type Frames = Frames<Rc<Arena>>;
    type Invalidator = Watched;

    #[inline]
    fn memory(&self) -> &Arena {
        &self.arena
    }

    #[inline]
    fn frames(&self) -> &Frames<Rc<Arena>> {
        &self.frames
    }

    #[inline]
    fn invalidator(&mut self) -> &mut Watched {
        &mut self.iommu
    }

    #[inline]
    fn now(&self) -> Nanos {
        self.now
    }
}

/// The unit of a profile.
fn unit_config(profile: &Profile) -> Result<UnitConfig, GeometryError> {
    let fully = |entries: u32| Geometry::new(1, entries);
    let [one, two, three] = profile.walk_cache;
    Ok(UnitConfig {
        iotlb: Geometry::new(profile.iotlb_sets, profile.iotlb_ways)?,
        walk_caches: [fully(one)?, fully(two)?, fully(three)?],
        contexts: Geometry::new(64, 1)?,
        ..UnitConfig::UNCACHED
    })
}
