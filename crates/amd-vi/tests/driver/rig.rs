//! A unit on a model.

use std::rc::Rc;

use ringfence_amd_vi::{Interrupts, Options, Stage, Unit, UnitError, device_table_bytes};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{AmdV1, Coherency, Format, Level, Table};
use ringfence_types::{Access, DomainId, PhysAddr, PhysRange, RequesterId};

use crate::model::Model;
use crate::units;
pub(crate) use crate::units::{invalidate, pages, range};

pub(crate) type TestUnit<'f> = Unit<Rc<Model>, Rc<Arena>, &'f Frames<Rc<Arena>>>;

/// EFRSup, and no NpCache.
pub(crate) const HEADER: u32 = 0x0803_000f;
/// HATS = 10b, IASup.
pub(crate) const FEATURE: u64 = 0x840;
/// As [`FEATURE`], and GTSup, GATS = 01b, GIoSup.
pub(crate) const GUEST_FEATURE: u64 = 0x1_0000_0000_1850;
pub(crate) const POLL_LIMIT: u32 = 1000;
/// The largest requester id that has an entry.
pub(crate) const LARGEST: RequesterId = RequesterId::new(0x1ff);
pub(crate) const DEVICE: RequesterId = RequesterId::new(0x20);
pub(crate) const OTHER: RequesterId = RequesterId::new(0x28);
pub(crate) const DOMAIN: DomainId = DomainId::new(5);
pub(crate) const IOVA: u64 = 0x4020_1000;
pub(crate) const PA: u64 = 0x80_0000;
pub(crate) const DEVICE_TABLE: u64 = 0x10_0000;

pub(crate) struct Rig {
    pub(crate) memory: Rc<Arena>,
    pub(crate) frames: Frames<Rc<Arena>>,
    pub(crate) model: Rc<Model>,
    pub(crate) options: Options,
}

impl Rig {
    pub(crate) fn new(feature: u64) -> Self {
        Self::with(HEADER, feature)
    }

    pub(crate) fn with(header: u32, feature: u64) -> Self {
        let memory = Rc::new(Arena::new(64 << 20).unwrap());
        let region = PhysRange::new(PhysAddr::new(0x20_0000), 4 << 20).unwrap();
        let table = PhysAddr::new(DEVICE_TABLE);
        Self {
            frames: Frames::new(memory.clone(), region),
            model: Model::new(memory.clone(), feature, header >> 26 & 1 != 0),
            memory,
            options: Options {
                capability_header: header,
                ivhd_flags: 0,
                device_table: PhysRange::new(table, device_table_bytes(LARGEST)).unwrap(),
                interrupts: Interrupts::Pass,
                poll_limit: POLL_LIMIT,
            },
        }
    }

    pub(crate) fn start(&self) -> Result<TestUnit<'_>, UnitError> {
        let (registers, memory) = (self.model.clone(), self.memory.clone());
        Unit::new(registers, memory, &self.frames, &self.options)
    }

    pub(crate) fn unit(&self) -> TestUnit<'_> {
        self.start().unwrap()
    }

    /// A host table of `levels` levels.
    pub(crate) fn table(&self, domain: DomainId, levels: u8) -> Table<AmdV1> {
        let format = AmdV1::new(Level::new(levels).unwrap());
        let coherency = Coherency::Coherent;
        Table::new(format, domain, coherency, &self.memory, &self.frames).unwrap()
    }

    pub(crate) fn map<F: Format>(&self, table: &Table<F>, iova: u64, pa: u64, pages: u64) {
        units::map(table, &self.memory, &self.frames, [iova, pa, pages]);
    }

    pub(crate) fn unmap<F: Format>(&self, table: &Table<F>, iova: u64, pages: u64) {
        let _ = table.unmap(&self.memory, range(iova, pages)).unwrap();
    }

    pub(crate) fn access(&self, device: RequesterId, iova: u64) -> Option<u64> {
        let at = self.model.access(device, iova, Access::Write);
        at.map(|at| at.get())
    }

    /// Forgets executed commands, and returns them.
    pub(crate) fn executed(&self) -> Vec<[u64; 2]> {
        let mut executed = Vec::new();
        self.model
            .change(|state| executed.append(&mut state.executed));
        executed
    }
}

pub(crate) fn host(table: &Table<AmdV1>) -> Stage {
    Stage::Host {
        root: table.root(),
        levels: table.format().root_level(),
    }
}
