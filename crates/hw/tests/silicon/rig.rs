//! A machine with a walking unit: memory, frames, context tables.

use proptest::test_runner::{Config as ProptestConfig, RngSeed};
use ringfence_hw::{FaultLog, Geometry, InvalidationGranularity, Replacement, UnitConfig, VtdUnit};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Format, Levels, MapRequest, SecondStage, Table,
    TranslationType,
};
use ringfence_types::{
    Access, DomainId, Fault, FaultReason, Iova, PageSize, Permissions, Pfn, PfnRange, PhysAddr,
    PhysMemory, PhysRange, RequesterId,
};

pub(crate) const READ: Access = Access::Read;
pub(crate) const WRITE: Access = Access::Write;
pub(crate) const RW: Permissions = Permissions::READ_WRITE;

/// Two devices on one bus, one on another.
pub(crate) const NIC: RequesterId = RequesterId::new(0x0100);
pub(crate) const DISK: RequesterId = RequesterId::new(0x0208);
pub(crate) const GPU: RequesterId = RequesterId::new(0x0110);

pub(crate) const A: DomainId = DomainId::new(1);
pub(crate) const B: DomainId = DomainId::new(0xffff);

const ARENA: u64 = 256 << 20;
const TABLES: u64 = 128 << 20;

pub(crate) fn arena() -> Arena {
    Arena::new(ARENA).unwrap()
}

pub(crate) fn geometry(sets: u32, ways: u32) -> Geometry {
    Geometry::new(sets, ways).unwrap()
}

/// Large enough that no test causes an eviction unless it intends to.
pub(crate) fn roomy() -> UnitConfig {
    UnitConfig {
        iotlb: geometry(16, 4),
        walk_caches: [geometry(4, 4); 3],
        contexts: geometry(16, 1),
        replacement: Replacement::Lru,
        fault_log: FaultLog::MAX_CAPACITY,
        granularity: InvalidationGranularity::Selective,
    }
}

/// Proptest configuration with a fixed seed: every run is identical.
pub(crate) fn cases(cases: u32, seed: u64) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Outcome of an access: ranges as (first byte, length), or address and reason of the fault.
pub(crate) type Seen = Result<Vec<(u64, u64)>, (u64, FaultReason)>;

pub(crate) fn seen(result: Result<impl AsRef<[PhysRange]>, Fault>) -> Seen {
    match result {
        Ok(ranges) => Ok(ranges
            .as_ref()
            .iter()
            .map(|range| (range.start().get(), range.bytes()))
            .collect()),
        Err(fault) => Err((fault.iova.get(), fault.reason)),
    }
}

pub(crate) struct Rig<'m> {
    pub(crate) mem: &'m Arena,
    pub(crate) frames: Frames<&'m Arena>,
    pub(crate) contexts: ContextTables,
    pub(crate) unit: VtdUnit,
}

impl<'m> Rig<'m> {
    /// Creates an enabled unit with an empty root table.
    pub(crate) fn new(mem: &'m Arena, config: &UnitConfig) -> Self {
        let region = PhysRange::new(PhysAddr::new(TABLES), ARENA - TABLES).unwrap();
        let frames = Frames::new(mem, region);
        let contexts = ContextTables::new(Coherency::Coherent, mem, &frames).unwrap();
        let mut unit = VtdUnit::vtd(config);
        unit.set_root_table(contexts.root());
        unit.enable();
        Self {
            mem,
            frames,
            contexts,
            unit,
        }
    }

    /// Creates a table of four levels and 4 KiB pages for `domain` and attaches `devices`.
    pub(crate) fn domain(
        &mut self,
        domain: DomainId,
        devices: &[RequesterId],
    ) -> Table<SecondStage> {
        self.domain_of(SecondStage::new(Levels::Four), domain, devices)
    }

    pub(crate) fn domain_of(
        &mut self,
        format: SecondStage,
        domain: DomainId,
        devices: &[RequesterId],
    ) -> Table<SecondStage> {
        let table =
            Table::new(format, domain, Coherency::Coherent, self.mem, &self.frames).unwrap();
        for device in devices {
            self.attach(*device, domain, table.root(), format.levels());
        }
        table
    }

    pub(crate) fn attach(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        root: PhysAddr,
        levels: Levels,
    ) {
        let translation = TranslationType::Table { root, levels };
        self.attach_context(
            device,
            &Context {
                domain,
                translation,
            },
        );
    }

    pub(crate) fn attach_context(&mut self, device: RequesterId, context: &Context) {
        self.contexts
            .attach(self.mem, &self.frames, device, context)
            .unwrap();
    }

    pub(crate) fn map<F: Format>(
        &self,
        table: &Table<F>,
        iova: u64,
        pa: u64,
        pages: u64,
        permissions: Permissions,
    ) {
        let request = request(iova, pa, pages, permissions);
        table.map(self.mem, &self.frames, request).unwrap();
    }

    pub(crate) fn unmap<F: Format>(&self, table: &Table<F>, iova: u64, pages: u64) {
        // Discard the obligation: these tests invalidate by hand, or intentionally do not.
        let _ = table.unmap(self.mem, pages_at(iova, pages)).unwrap();
    }

    pub(crate) fn dma(
        &mut self,
        device: RequesterId,
        iova: u64,
        bytes: u64,
        access: Access,
    ) -> Seen {
        let result = self
            .unit
            .translate(self.mem, device, Iova::new(iova), bytes, access);
        seen(result.map(|translation| translation.to_vec()))
    }

    /// Overwrites the entry for `iova` in the table of `level`, found from the root.
    pub(crate) fn poke(
        &self,
        table: &Table<SecondStage>,
        level: u8,
        iova: u64,
        change: impl FnOnce(u64) -> u64,
    ) {
        let mut at = table.root().get();
        let mut here = table.format().root_level().get();
        loop {
            let index = iova >> (3 + 9 * u32::from(here)) & 511;
            let word = self.mem.word(PhysAddr::new(at + index * 8)).unwrap();
            let raw = word.load(std::sync::atomic::Ordering::Relaxed);
            if here == level {
                word.store(change(raw), std::sync::atomic::Ordering::Relaxed);
                return;
            }
            assert_ne!(raw & 3, 0, "path to {iova:#x} ends at level {here}");
            at = raw & 0x000f_ffff_ffff_f000;
            here -= 1;
        }
    }
}

pub(crate) fn request(iova: u64, pa: u64, pages: u64, permissions: Permissions) -> MapRequest {
    MapRequest {
        iova: Iova::new(iova),
        pa: PhysAddr::new(pa),
        pages,
        permissions,
    }
}

pub(crate) fn pages_at(iova: u64, pages: u64) -> PfnRange {
    PfnRange::new(Pfn::containing(Iova::new(iova)), pages).unwrap()
}

pub(crate) fn format(levels: Levels, largest: PageSize) -> SecondStage {
    SecondStage::new(levels).with_pages_up_to(largest)
}
