//! The judge itself: a VT-d unit in legacy mode with the fewest registers, driven by hand.

use std::rc::Rc;

use ringfence_memory::Frames;
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, SecondStage, Table, TranslationType,
};
use ringfence_qemu_judge::family::{Family, Reported};
use ringfence_qemu_judge::{
    Board, Broken, Disagreement, GuestRam, Kind, Machine, Options, QtestRegisters, RegisterRead,
    Setup, drive,
};
use ringfence_types::{
    Access, Invalidation, InvalidationError, Invalidator, Iova, PageSize, Registers, RequesterId,
    Ticket,
};

const BASE: u64 = 0xfed9_0000;
const GCMD: u64 = 0x18;
const RTADDR: u64 = 0x20;
const CCMD: u64 = 0x28;
const FSTS: u64 = 0x34;
/// QEMU's IRO and FRO.
const IOTLB: u64 = 0xf8;
const FRCD: u64 = 0x220;

struct ByHand<'m> {
    registers: QtestRegisters,
    ram: Rc<GuestRam>,
    frames: &'m Frames<Rc<GuestRam>>,
    contexts: ContextTables,
}

impl<'m> ByHand<'m> {
    fn new(machine: &'m Machine) -> Self {
        let (ram, frames) = (machine.ram(), machine.frames());
        let registers = machine.registers(BASE);
        let contexts = ContextTables::new(Coherency::Coherent, &ram, frames).unwrap();
        registers.write64(RTADDR, contexts.root().get());
        registers.write32(GCMD, 1 << 30);
        registers.write32(GCMD, 1 << 31);
        Self {
            registers,
            ram,
            frames,
            contexts,
        }
    }

    /// Invalidates all contexts and all translations.
    fn invalidate(&self) {
        self.registers.write64(CCMD, 1 << 63 | 1 << 61);
        self.registers.write64(IOTLB, 1 << 63 | 1 << 60);
    }
}

impl Invalidator for ByHand<'_> {
    fn submit(&mut self, _request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.invalidate();
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _ticket: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

impl Family for ByHand<'_> {
    type Format = SecondStage;

    fn format(&self) -> SecondStage {
        SecondStage::new(Levels::Three).with_pages_up_to(PageSize::Size2M)
    }

    fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    fn attach(&mut self, device: RequesterId, table: &Table<SecondStage>) -> anyhow::Result<()> {
        let context = Context {
            domain: table.domain(),
            translation: TranslationType::Table {
                root: table.root(),
                levels: Levels::Three,
            },
        };
        let contexts = &mut self.contexts;
        contexts
            .attach(&self.ram, self.frames, device, &context)
            .map_err(|error| anyhow::anyhow!("{error:?}"))?;
        self.invalidate();
        Ok(())
    }

    fn detach(&mut self, device: RequesterId) -> anyhow::Result<()> {
        self.contexts.detach(&self.ram, device)?;
        self.invalidate();
        Ok(())
    }

    fn fault_registers(&self) -> Vec<RegisterRead> {
        [FRCD + 8, FRCD]
            .map(|offset| RegisterRead::Double(BASE + offset))
            .to_vec()
    }

    fn next_fault(&mut self) -> anyhow::Result<Option<Reported>> {
        let high = self.registers.read64(FRCD + 8);
        if high >> 63 == 0 {
            return Ok(None);
        }
        let low = self.registers.read64(FRCD);
        self.registers.write64(FRCD + 8, 1 << 63);
        self.registers.write32(FSTS, 1);
        let access = match high >> 62 & 1 {
            0 => Access::Write,
            _ => Access::Read,
        };
        Ok(Some(Reported::Fault {
            device: RequesterId::new(high as u16),
            iova: Iova::new(low),
            access: Some(access),
        }))
    }
}

fn run(broken: Broken, accesses: u64) -> anyhow::Result<ringfence_qemu_judge::Report> {
    let machine = Machine::start(&Setup {
        board: Board::Q35,
        options: "",
        arguments: &["-device", "intel-iommu"],
        devices: &[0x20, 0x28, 0x31],
        readers: &[0x40],
    })?;
    let mut unit = ByHand::new(&machine);
    let options = Options {
        seed: 1,
        accesses,
        broken,
    };
    drive(&machine, &mut unit, &options)
}

#[test]
fn every_verdict_is_the_oracles() {
    let report = run(Broken::Nothing, 5_000).unwrap();
    println!("{report}");
    for kind in Kind::ALL {
        assert!(report.of(kind) > 50, "{kind:?}: {report}");
    }
}

#[test]
fn forgotten_invalidations_are_caught() {
    let error = run(Broken::Forgotten, 5_000).unwrap_err();
    println!("{error}");
    assert!(error.downcast_ref::<Disagreement>().is_some(), "{error}");
}
