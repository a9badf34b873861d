//! A unit on a model.

use std::rc::Rc;

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Arm, Format, Granule4K, Table};
use ringfence_smmu_v3::{Capabilities, Options, PageTable, Translation, Unit, UnitError};
use ringfence_types::{
    CachedLevels, DomainId, Invalidation, PageSize, PhysAddr, PhysRange, RequesterId,
};

use crate::model::{Executed, Model};
use crate::units;
pub(crate) use crate::units::{invalidate, pages, range};

pub(crate) type TestUnit<'f> = Unit<Rc<Model>, Rc<Arena>, &'f Frames<Rc<Arena>>>;
pub(crate) type TestTable = Table<Arm<Granule4K>>;

/// Both stages, VMSAv8-64, COHACC, ASIDs and VMIDs of 16 bits, little-endian, two levels;
/// stream ids of 16 bits, queues of 2^8 and 2^7 entries; RIL; 44 bits of address, all granules.
pub(crate) const IDENTIFICATION: [u64; 4] = [0x0844_101b, 0x0107_0010, 0x400, 0x74];
pub(crate) const COHERENT: u64 = 0x10;
pub(crate) const TWO_LEVELS: u64 = 1 << 27;
pub(crate) const POLL_LIMIT: u32 = 1000;
pub(crate) const DEVICE: RequesterId = RequesterId::new(0x20);
pub(crate) const OTHER: RequesterId = RequesterId::new(0x28);
/// In another table of the second level.
pub(crate) const FAR: RequesterId = RequesterId::new(0x1234);
pub(crate) const DOMAIN: DomainId = DomainId::new(5);
pub(crate) const WIDTH: u32 = 39;
pub(crate) const IOVA: u64 = 0x4020_1000;
pub(crate) const PA: u64 = 0x80_0000;
pub(crate) const STREAM_TABLE: u64 = 0xc0_0000;

pub(crate) struct Rig {
    pub(crate) memory: Rc<Arena>,
    pub(crate) frames: Frames<Rc<Arena>>,
    pub(crate) model: Rc<Model>,
    pub(crate) options: Options,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(IDENTIFICATION)
    }

    /// A unit whose `IDR0` lacks `features`.
    pub(crate) fn without(features: u64) -> Self {
        let [first, rest @ ..] = IDENTIFICATION;
        let [idr1, idr3, idr5] = rest;
        Self::with([first & !features, idr1, idr3, idr5])
    }

    /// A unit without invalidation of ranges.
    pub(crate) fn without_ranges() -> Self {
        let [idr0, idr1, _, idr5] = IDENTIFICATION;
        Self::with([idr0, idr1, 0, idr5])
    }

    pub(crate) fn with(identification: [u64; 4]) -> Self {
        let memory = match identification[0] & COHERENT {
            0 => Arena::with_device_view(16 << 20),
            _ => Arena::new(16 << 20),
        };
        let memory = Rc::new(memory.unwrap());
        let region = PhysRange::new(PhysAddr::new(0x20_0000), 4 << 20).unwrap();
        let capabilities = Capabilities::decode(identification.map(|raw| raw as u32));
        let bits = capabilities.stream_id_bits.min(16);
        let bytes = capabilities.stream_table_bytes(bits, PageSize::Size4K);
        let table = PhysRange::new(PhysAddr::new(STREAM_TABLE), bytes).unwrap();
        Self {
            frames: Frames::new(memory.clone(), region),
            model: Model::new(memory.clone(), identification),
            memory,
            options: Options {
                poll_limit: POLL_LIMIT,
                coherent_guests: true,
                ..Options::new(table, bits)
            },
        }
    }

    pub(crate) fn start(&self) -> Result<TestUnit<'_>, UnitError> {
        let (registers, memory) = (self.model.clone(), self.memory.clone());
        Unit::new(registers, memory, &self.frames, &self.options)
    }

    pub(crate) fn unit(&self) -> TestUnit<'_> {
        let unit = self.start().unwrap();
        self.executed();
        unit
    }

    pub(crate) fn table_of(&self, format: Arm<Granule4K>, domain: DomainId) -> TestTable {
        let coherency = Capabilities::read(&self.model).unwrap().coherency();
        Table::new(format, domain, coherency, &self.memory, &self.frames).unwrap()
    }

    pub(crate) fn stage1(&self, domain: DomainId) -> TestTable {
        self.table_of(Arm::stage1(WIDTH).unwrap(), domain)
    }

    pub(crate) fn stage2(&self, domain: DomainId) -> TestTable {
        self.table_of(Arm::stage2(WIDTH).unwrap(), domain)
    }

    pub(crate) fn map<F: Format>(&self, table: &Table<F>, iova: u64, pa: u64, pages: u64) {
        units::map(table, &self.memory, &self.frames, [iova, pa, pages]);
    }

    pub(crate) fn unmap<F: Format>(&self, table: &Table<F>, iova: u64, pages: u64) {
        let _ = table.unmap(&self.memory, range(iova, pages)).unwrap();
    }

    /// A write of a device.
    pub(crate) fn access(&self, device: RequesterId, iova: u64) -> Option<u64> {
        self.model.access(device.get().into(), iova, true)
    }

    /// Forgets executed commands, and returns them.
    pub(crate) fn executed(&self) -> Vec<Executed> {
        std::mem::take(&mut self.model.change().executed)
    }

    /// As [`executed`](Self::executed), the words of the commands only.
    pub(crate) fn commands(&self) -> Vec<[u64; 2]> {
        self.executed().iter().map(|one| one.command).collect()
    }
}

pub(crate) fn one(table: &TestTable) -> Translation {
    Translation::Stage1(PageTable::of(table))
}

pub(crate) fn two(table: &TestTable) -> Translation {
    Translation::Stage2(PageTable::of(table))
}

pub(crate) fn all_levels(domain: DomainId, iova: u64, pages: u64) -> Invalidation {
    Invalidation::Pages {
        domain,
        range: range(iova, pages),
        levels: CachedLevels::All,
    }
}
