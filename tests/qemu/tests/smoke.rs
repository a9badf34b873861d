//! The judge itself: a VT-d unit in legacy mode with the fewest registers, driven by hand.

use std::rc::Rc;

use ringfence_memory::Frames;
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, SecondStage, Table, TranslationType,
};
use ringfence_qemu_judge::family::{Family, Reported};
use ringfence_qemu_judge::{
    Board, Broken, Disagreement, GuestRam, Kind, Machine, Options, QtestRegisters, RegisterRead,
    Report, Setup, TestDevice, Verdict, drive,
};
use ringfence_types::{
    Access, Invalidation, InvalidationError, Invalidator, Iova, PageSize, PhysAddr, PhysRange,
    Registers, RequesterId, Ticket,
};

const BASE: u64 = 0xfed9_0000;
const GCMD: u64 = 0x18;
const RTADDR: u64 = 0x20;
const CCMD: u64 = 0x28;
const FSTS: u64 = 0x34;
/// QEMU's IRO and FRO.
const IOTLB: u64 = 0xf8;
const FRCD: u64 = 0x220;

/// A wrong report or a wrong table, which the driver must notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    None,
    OtherRequester,
    OtherPage,
    OtherAccess,
    NoRecord,
    RecordWithoutFault,
    OtherTable,
    StrayByte,
}

struct ByHand<'m> {
    lie: Lie,
    /// Root of the first table attached.
    first: Option<PhysAddr>,
    faults: u64,
    extra: Option<Reported>,
    registers: QtestRegisters,
    ram: Rc<GuestRam>,
    frames: &'m Frames<Rc<GuestRam>>,
    contexts: ContextTables,
    buffers: PhysRange,
}

impl<'m> ByHand<'m> {
    fn new(machine: &'m Machine, lie: Lie) -> Self {
        let (ram, frames) = (machine.ram(), machine.frames());
        let registers = machine.registers(BASE);
        let contexts = ContextTables::new(Coherency::Coherent, &ram, frames).unwrap();
        registers.write64(RTADDR, contexts.root().get());
        registers.write32(GCMD, 1 << 30);
        registers.write32(GCMD, 1 << 31);
        Self {
            lie,
            first: None,
            faults: 0,
            extra: None,
            registers,
            ram,
            frames,
            contexts,
            buffers: machine.buffers(),
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
        let first = *self.first.get_or_insert(table.root());
        let root = match self.lie {
            Lie::OtherTable => first,
            _ => table.root(),
        };
        let context = Context {
            domain: table.domain(),
            translation: TranslationType::Table {
                root,
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
            return Ok(self.extra.take());
        }
        let low = self.registers.read64(FRCD);
        self.registers.write64(FRCD + 8, 1 << 63);
        self.registers.write32(FSTS, 1);
        let access = match high >> 62 & 1 {
            0 => Access::Write,
            _ => Access::Read,
        };
        let mut device = RequesterId::new(high as u16);
        let (mut iova, mut access) = (Iova::new(low), Some(access));
        self.faults += 1;
        let lie = if self.faults == 100 {
            self.lie
        } else {
            Lie::None
        };
        match lie {
            Lie::None | Lie::OtherTable | Lie::RecordWithoutFault => {}
            Lie::OtherRequester => device = RequesterId::new(high as u16 ^ 8),
            Lie::OtherPage => iova = iova.wrapping_add(4096),
            Lie::OtherAccess => access = Some(Access::Read),
            Lie::NoRecord => return Ok(None),
            Lie::StrayByte => self.ram.fill(self.buffers.start(), 1, 1)?,
        }
        let fault = Reported::Fault {
            device,
            iova,
            access,
        };
        if lie == Lie::RecordWithoutFault {
            self.extra = Some(Reported::Fault {
                device,
                iova: Iova::new(0x7000),
                access,
            });
        }
        Ok(Some(fault))
    }
}

fn run(lie: Lie, broken: Broken) -> anyhow::Result<Report> {
    let machine = Machine::start(&Setup {
        board: Board::Q35,
        options: "",
        arguments: &["-device", "intel-iommu"],
        devices: &[0x20, 0x28, 0x31],
        readers: &[0x40],
    })?;
    let mut unit = ByHand::new(&machine, lie);
    let options = Options {
        seed: 1,
        accesses: 5_000,
        broken,
    };
    drive(&machine, &mut unit, &options)
}

#[test]
fn every_verdict_is_the_oracles() {
    let report = run(Lie::None, Broken::Nothing).unwrap();
    println!("{report}");
    for kind in Kind::ALL {
        assert!(report.of(kind) > 50, "{kind:?}: {report}");
    }
}

#[test]
fn forgotten_invalidations_are_caught() {
    let error = run(Lie::None, Broken::Forgotten).unwrap_err();
    let disagreement = error.downcast_ref::<Disagreement>();
    let found = disagreement.map(|found| (found.kind, found.problem.as_str()));
    let expected = "write: Landed, expected Stopped";
    assert_eq!(found, Some((Kind::AfterUnmap, expected)), "{error}");
}

/// The driver compares fault records and addresses, not verdicts only.
#[test]
fn false_reports_and_tables_are_caught() {
    for (lie, problem) in [
        (Lie::OtherRequester, "wrong fault record"),
        (Lie::OtherPage, "wrong fault record"),
        (Lie::OtherAccess, "wrong fault record"),
        (Lie::NoRecord, "no fault record"),
        (Lie::RecordWithoutFault, "wrong fault record"),
        (Lie::OtherTable, "the bytes are not at"),
        (Lie::StrayByte, "bytes landed at"),
    ] {
        let error = run(lie, Broken::Nothing).unwrap_err();
        assert!(error.to_string().contains(problem), "{lie:?}: {error}");
    }
}

/// Without an IOMMU, addresses of devices are physical.
#[test]
fn devices_of_every_board_reach_ram() {
    for board in [Board::Q35, Board::ArmVirt, Board::RiscvVirt] {
        let machine = Machine::start(&Setup {
            board,
            options: "",
            arguments: &[],
            devices: &[0x20, 0x31],
            readers: &[0x40],
        })
        .unwrap();
        let (ram, at) = (machine.ram(), machine.buffers().start());
        for device in machine.devices() {
            let verdict = device.write(Iova::new(at.get()), 8).unwrap();
            assert_eq!(verdict, Verdict::Landed, "{board:?}");
            for offset in 0..8 {
                let found = ram.byte(at.wrapping_add(offset));
                assert_eq!(found, Some(TestDevice::pattern(offset)), "{board:?}");
            }
            ram.fill(at, 8, 0).unwrap();
        }
        ram.fill(at, 8, 0xa5).unwrap();
        let reader = &machine.readers()[0];
        reader.read(Iova::new(at.get()), 8).unwrap();
        let copy = at.wrapping_add(4096);
        reader.write(Iova::new(copy.get()), 8).unwrap();
        assert_eq!(ram.byte(copy.wrapping_add(7)), Some(0xa5), "{board:?}");
    }
}
