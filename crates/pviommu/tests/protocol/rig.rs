//! A host: memory, frames, a backend, and the unit that translates for the guest's assigned
//! devices.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use proptest::test_runner::{Config as ProptestConfig, RngSeed};
use ringfence_hw::{FaultLog, Geometry, InvalidationGranularity, Replacement, UnitConfig, VtdUnit};
use ringfence_memory::fake::FaultyFrames;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, ContextTables, Levels, SecondStage};
use ringfence_pviommu::backend::{
    Backend, BackendLimits, DeviceSlot, FixedLastTable, HardwareTables, LastTable, OnDemand,
};
use ringfence_pviommu::wire::{
    Config, Devid, Gpa, GuestPhysical, Status, encode_map, encode_unmap,
};
use ringfence_types::{
    Access, AddressRange, CachedLevels, Direction, DomainId, FaultReason, FrameSource,
    Invalidation, InvalidationError, Invalidator, Iova, IovaRange, OutOfFrames, PhysAddr,
    PhysRange, RequesterId, Ticket,
};

pub(crate) const PAGE: u64 = 4096;
/// The devices of [`config`], and the first addresses of the window and the guest's memory.
pub(crate) const NIC: Devid = Devid::new(0x10);
pub(crate) const DISK: Devid = Devid::new(0x11);
pub(crate) const WINDOW: u64 = 0x10_0000;
pub(crate) const MEMORY: u64 = 0;

const ARENA: u64 = 512 << 20;
const TABLES: u64 = 64 << 20;
const FRAMES: u64 = 256 << 20;

/// Returns a proptest configuration with a fixed seed, so that every run is the same.
pub(crate) fn cases(cases: u32, seed: u64) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Two devices, requests of up to 64 pages, a window of 64 MiB.
pub(crate) fn config() -> Config {
    let window = IovaRange::new(Iova::new(WINDOW), 64 << 20).unwrap();
    Config::new(window, 64, [0x10, 0x11]).unwrap()
}

/// 8 MiB at address 0 and 4 MiB after a hole.
pub(crate) fn memory() -> Vec<AddressRange<GuestPhysical>> {
    let range = |start, bytes| AddressRange::new(Gpa::new(start), bytes).unwrap();
    vec![range(MEMORY, 8 << 20), range(1 << 30, 4 << 20)]
}

/// A shared source of frames.
#[derive(Debug, Clone)]
pub(crate) struct Source(pub(crate) Arc<FaultyFrames<Frames<Arc<Arena>>>>);

impl FrameSource for Source {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        self.0.alloc_zeroed()
    }

    fn free(&self, frame: PhysAddr) {
        self.0.free(frame);
    }
}

/// The unit, with switches that make its invalidations fail.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) hardware: VtdUnit,
    pub(crate) fails: Rc<Cell<bool>>,
    /// If set, only invalidations of table pages fail.
    pub(crate) keeps_tables: Rc<Cell<bool>>,
    /// Number of submitted invalidations.
    pub(crate) submitted: u64,
}

impl Invalidator for Unit {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.submitted += 1;
        let leaves = matches!(
            request,
            Invalidation::Pages {
                levels: CachedLevels::Leaves,
                ..
            }
        );
        if self.fails.get() || (self.keeps_tables.get() && !leaves) {
            return Err(InvalidationError::Failed);
        }
        self.hardware.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.hardware.poll(ticket)
    }
}

pub(crate) type Tables = HardwareTables<Arc<Arena>, Source, Unit>;

pub(crate) type Host<K> = Backend<OnDemand<Arc<Arena>, Source, K>, Tables>;

/// A host with one guest.
pub(crate) struct Rig<K = FixedLastTable> {
    pub(crate) arena: Arc<Arena>,
    /// Frames for tables and for the guest.
    pub(crate) tables: Source,
    pub(crate) frames: Source,
    pub(crate) backend: Host<K>,
    pub(crate) fails: Rc<Cell<bool>>,
    pub(crate) keeps_tables: Rc<Cell<bool>>,
    /// The guest's vCPUs, which cache the second stage.
    pub(crate) processors: Unit,
    devices: Vec<Devid>,
}

fn geometry(sets: u32, ways: u32) -> Geometry {
    Geometry::new(sets, ways).unwrap()
}

fn unit(fails: &Rc<Cell<bool>>, keeps_tables: &Rc<Cell<bool>>) -> Unit {
    // Large enough that the caches evict nothing.
    let config = UnitConfig {
        iotlb: geometry(64, 4),
        walk_caches: [geometry(4, 4); 3],
        contexts: geometry(16, 1),
        replacement: Replacement::Lru,
        fault_log: FaultLog::MAX_CAPACITY,
        granularity: InvalidationGranularity::Selective,
    };
    Unit {
        hardware: VtdUnit::vtd(&config),
        fails: Rc::clone(fails),
        keeps_tables: Rc::clone(keeps_tables),
        submitted: 0,
    }
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(
            config(),
            BackendLimits::default(),
            &memory(),
            FixedLastTable::default(),
        )
    }
}

impl<K: LastTable> Rig<K> {
    pub(crate) fn with(
        config: Config,
        limits: BackendLimits,
        memory: &[AddressRange<GuestPhysical>],
        last: K,
    ) -> Self {
        Self::prepared(config, limits, memory, last, |_| {})
    }

    /// Calls `prepare` on the tables before the backend owns them.
    pub(crate) fn prepared(
        config: Config,
        limits: BackendLimits,
        memory: &[AddressRange<GuestPhysical>],
        last: K,
        prepare: impl FnOnce(&mut Tables),
    ) -> Self {
        let arena = Arc::new(Arena::new(ARENA).unwrap());
        let source = |start, bytes| {
            let region = PhysRange::new(PhysAddr::new(start), bytes).unwrap();
            Source(Arc::new(FaultyFrames::new(Frames::new(
                Arc::clone(&arena),
                region,
            ))))
        };
        let tables = source(TABLES, FRAMES - TABLES);
        let frames = source(FRAMES, ARENA - FRAMES);
        let fails = Rc::new(Cell::new(false));
        let keeps_tables = Rc::new(Cell::new(false));
        let backing = OnDemand::new(
            Arc::clone(&arena),
            tables.clone(),
            frames.clone(),
            SecondStage::new(Levels::Four),
            DomainId::new(9),
            memory,
            last,
            (),
        )
        .unwrap();
        let devices: Vec<Devid> = config.devices().collect();
        let domains: Vec<DomainId> = (1..).take(devices.len()).map(DomainId::new).collect();
        let mut hardware = HardwareTables::new(
            Arc::clone(&arena),
            tables.clone(),
            unit(&fails, &keeps_tables),
            SecondStage::new(Levels::Four),
            Coherency::Coherent,
            &domains,
        )
        .unwrap();
        let mut contexts = ContextTables::new(Coherency::Coherent, &arena, &tables).unwrap();
        for (index, device) in (0..).zip(&devices) {
            let context = hardware.context(DeviceSlot::new(index)).unwrap();
            let id = RequesterId::new(device.get() as u16);
            contexts.attach(&arena, &tables, id, &context).unwrap();
        }
        prepare(&mut hardware);
        let mut backend = Backend::new(config, limits, backing, hardware);
        let hardware = &mut backend.tables().invalidator().hardware;
        hardware.set_root_table(contexts.root());
        hardware.enable();
        Self {
            arena,
            tables,
            frames,
            backend,
            processors: unit(&fails, &keeps_tables),
            fails,
            keeps_tables,
            devices,
        }
    }

    pub(crate) fn map(
        &mut self,
        device: Devid,
        direction: Direction,
        pages: &[(u64, u64)],
    ) -> Status {
        self.backend.handle(&map(device, direction, pages))
    }

    pub(crate) fn unmap(&mut self, device: Devid, giovas: &[u64]) -> Status {
        self.backend.handle(&unmap(device, giovas))
    }

    /// Returns the host address of a byte that the device accesses.
    pub(crate) fn reach(
        &mut self,
        device: Devid,
        giova: u64,
        access: Access,
    ) -> Result<PhysAddr, FaultReason> {
        let device = RequesterId::new(device.get() as u16);
        let unit = &mut self.backend.tables().invalidator().hardware;
        unit.translate(&self.arena, device, Iova::new(giova), 1, access)
            .map(|reached| reached.first().start())
            .map_err(|fault| fault.reason)
    }

    /// Looks up the frame of a page.
    pub(crate) fn frame(&mut self, gpa: u64) -> PhysAddr {
        self.backend.backing().resolve(Gpa::new(gpa)).unwrap()
    }

    pub(crate) fn devices(&self) -> Vec<Devid> {
        self.devices.clone()
    }
}

pub(crate) fn map(device: Devid, direction: Direction, pages: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let pages = pages.iter().map(|(g, p)| (Iova::new(*g), Gpa::new(*p)));
    encode_map(&mut bytes, device, direction, pages).unwrap();
    bytes
}

pub(crate) fn unmap(device: Devid, giovas: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_unmap(&mut bytes, device, giovas.iter().map(|g| Iova::new(*g))).unwrap();
    bytes
}
