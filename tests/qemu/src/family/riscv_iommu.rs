//! The RISC-V IOMMU: `qemu-system-riscv64 -M virt -device riscv-iommu-pci`.

use std::collections::VecDeque;
use std::rc::Rc;

use anyhow::{Context, anyhow, bail, ensure};
use ringfence_memory::Frames;
use ringfence_pgtable::{Coherency, Format, Levels, MapRequest, RiscV, Table};
use ringfence_riscv_iommu::{
    Cause, FaultEvent, FaultRecord, GuestFirstStage, Options, PageTable, Privilege, ProcessBits,
    Transaction, Translation, Unit,
};
use ringfence_types::{
    Access, CachedLevels, DomainId, GuestPhysAddr, Invalidation, InvalidationError, Invalidator,
    Iova, PageSize, Permissions, PhysAddr, RequesterId, Ticket,
};

use super::{Family, Reported};
use crate::machine::Machine;
use crate::qtest::{Commands, RegisterRead};
use crate::ram::GuestRam;
use crate::registers::QtestRegisters;

/// Device and function 1.0.
const UNIT: RequesterId = RequesterId::new(0x08);
/// Beyond the BARs of the test devices.
const BAR: u64 = 0x5000_0000;
const CONFIG_ID: u8 = 0x00;
const CONFIG_COMMAND: u8 = 0x04;
const CONFIG_BAR0: u8 = 0x10;
/// Vendor 1b36, device 0014.
const ID: u32 = 0x0014_1b36;
/// Memory space and bus master.
const COMMAND: u32 = 0x6;
/// Registers `fqh`, `fqt` and `fqcsr`.
const FQH: u64 = 48;
const FQT: u64 = 52;
const FQCSR: u64 = 76;
/// The second stage under nested tables is one domain, and tags of its processes are the driver's.
const GUEST: DomainId = DomainId::new(77);
/// Tag of the guest's own first stage.
const GUEST_SPACE: u32 = 0x54321;
/// Frames that hold tables lie in the first 32 MiB of RAM.
const FRAMES: u64 = 32 << 20;

/// The stage that the driver's tables are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// First stage without a second.
    First,
    /// First stage of process 0, found through a process directory.
    Process,
    /// Second stage without a first.
    Second,
    /// First stage of a guest, under a second stage that maps all RAM to itself.
    FirstOfGuest,
    /// Second stage of a guest whose first stage maps each address to itself.
    SecondOfGuest,
}

/// The driver's unit on QEMU's registers.
pub struct RiscvIommu<'m> {
    /// The driver under test.
    pub unit: Unit<QtestRegisters, Rc<GuestRam>>,
    ram: Rc<GuestRam>,
    frames: &'m Frames<Rc<GuestRam>>,
    stage: Stage,
    levels: Levels,
    /// The table of the other stage.
    other: Option<Table<RiscV>>,
    /// Fault records that the driver has not taken.
    faults: VecDeque<FaultEvent>,
}

impl<'m> RiscvIommu<'m> {
    /// Enables the PCI function of the unit, and the unit.
    ///
    /// # Errors
    /// The machine has no unit, or the unit fails.
    pub fn new(
        machine: &'m Machine,
        stage: Stage,
        levels: Levels,
        options: Options,
    ) -> anyhow::Result<Self> {
        let (ram, frames) = (machine.ram(), machine.frames());
        let registers = registers(machine)?;
        let unit = Unit::new(registers, ram.clone(), frames, options)?;
        let mut family = Self {
            unit,
            ram,
            frames,
            stage,
            levels,
            other: None,
            faults: VecDeque::new(),
        };
        family.other = match stage {
            Stage::FirstOfGuest => Some(family.identity_second_stage()?),
            Stage::SecondOfGuest => Some(family.identity_first_stage()?),
            Stage::First | Stage::Process | Stage::Second => None,
        };
        Ok(family)
    }

    fn root(&self, bytes: u64) -> anyhow::Result<PhysAddr> {
        let frames = bytes / PageSize::Size4K.bytes();
        let root = self.frames.alloc_contiguous(frames);
        root.map_err(|error| anyhow!("no root: {error}"))
    }

    fn table_at(&self, format: RiscV, id: DomainId) -> anyhow::Result<Table<RiscV>> {
        let root = self.root(Table::root_bytes_of(&format))?;
        Table::at(format, id, Coherency::Coherent, &self.ram, root)
            .map_err(|error| anyhow!("no table: {error}"))
    }

    /// A second stage that maps all RAM to itself.
    fn identity_second_stage(&self) -> anyhow::Result<Table<RiscV>> {
        let format = RiscV::second_stage(Levels::Three).with_pages_up_to(PageSize::Size2M);
        let table = self.table_at(format, GUEST)?;
        let ram = self.ram.range();
        self.identity(&table, ram.start(), ram.bytes())?;
        Ok(table)
    }

    /// A first stage with the driver's number of levels or four that maps the addresses of its
    /// second stage to themselves.
    fn identity_first_stage(&self) -> anyhow::Result<Table<RiscV>> {
        let levels = self.levels.max(Levels::Four);
        let format = RiscV::first_stage(levels).with_pages_up_to(PageSize::Size1G);
        let table = Table::new(
            format,
            DomainId::new(0),
            Coherency::Coherent,
            &self.ram,
            self.frames,
        );
        let table = table.map_err(|error| anyhow!("no table: {error}"))?;
        let width = RiscV::second_stage(self.levels).width();
        self.identity(&table, PhysAddr::ZERO, 1 << width.min(41))?;
        Ok(table)
    }

    fn identity(&self, table: &Table<RiscV>, at: PhysAddr, bytes: u64) -> anyhow::Result<()> {
        let request = MapRequest {
            iova: Iova::new(at.get()),
            pa: at,
            pages: bytes / PageSize::Size4K.bytes(),
            permissions: Permissions::READ_WRITE,
        };
        table
            .map(&self.ram, self.frames, request)
            .map_err(|error| anyhow!("map failed: {error}"))
    }

    fn translation(&self, table: &Table<RiscV>) -> anyhow::Result<(DomainId, Translation)> {
        let id = table.domain();
        let own = PageTable {
            root: table.root(),
            levels: self.levels,
        };
        let other = || self.other.as_ref().context("no table of the other stage");
        Ok(match self.stage {
            Stage::First => (id, Translation::FirstStage(own)),
            Stage::Process => (id, Translation::Processes(ProcessBits::Eight)),
            Stage::Second => (
                id,
                Translation::SecondStage {
                    table: own,
                    guest: GuestFirstStage::Bare,
                    msi: None,
                },
            ),
            Stage::FirstOfGuest => (
                GUEST,
                Translation::SecondStage {
                    table: PageTable {
                        root: other()?.root(),
                        levels: Levels::Three,
                    },
                    guest: GuestFirstStage::Table {
                        root: GuestPhysAddr::new(own.root.get()),
                        levels: own.levels,
                        space: id.get().into(),
                    },
                    msi: None,
                },
            ),
            Stage::SecondOfGuest => (
                id,
                Translation::SecondStage {
                    table: own,
                    guest: GuestFirstStage::Table {
                        root: GuestPhysAddr::new(other()?.root().get()),
                        levels: self.levels.max(Levels::Four),
                        space: GUEST_SPACE,
                    },
                    msi: None,
                },
            ),
        })
    }

    /// Submits what a guest's first stage owes.
    fn submit_for_guest(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        let (space, range, levels) = match request {
            Invalidation::Pages {
                domain,
                range,
                levels,
            } => (Some(domain), Some(range), levels),
            Invalidation::Domain(domain) => (Some(domain), None, CachedLevels::All),
            _ => return self.unit.submit(request),
        };
        let space = space.map(|domain| domain.get().into());
        self.unit
            .submit_guest_first_stage(GUEST, space, range, levels)
    }

    /// Takes all records from the unit. QEMU translates the parts of some accesses one by one, and
    /// reports a fault of a page each time, as the specification allows.
    fn take_faults(&mut self) {
        while let Some(event) = self.unit.next_fault() {
            let is_same = |last| match (last, &event) {
                (&FaultEvent::Record(last), FaultEvent::Record(next)) => {
                    let page = |record: &FaultRecord| record.iotval / PageSize::Size4K.bytes();
                    last.device_id == next.device_id
                        && last.cause == next.cause
                        && page(&last) == page(next)
                }
                _ => false,
            };
            if !self.faults.back().is_some_and(is_same) {
                self.faults.push_back(event);
            }
        }
    }

    fn decode(record: &FaultRecord) -> anyhow::Result<Reported> {
        let access = match record.transaction {
            Transaction::UntranslatedRead => Access::Read,
            Transaction::UntranslatedWrite => Access::Write,
            other => bail!("unexpected transaction {other:?}: {record:x?}"),
        };
        let is_expected = match record.cause {
            Cause::ReadPage | Cause::ReadGuestPage => access == Access::Read,
            Cause::WritePage | Cause::WriteGuestPage => access == Access::Write,
            Cause::DdtInvalid => true,
            _ => false,
        };
        ensure!(is_expected, "unexpected fault {record:x?}");
        Ok(Reported::Fault {
            device: record.requester(),
            iova: Iova::new(record.iotval),
            access: Some(access),
        })
    }
}

/// Enables the PCI function of the unit, and returns its registers.
///
/// # Errors
/// The machine has no such function.
pub fn registers(machine: &Machine) -> anyhow::Result<QtestRegisters> {
    let (board, qtest) = (machine.board(), machine.qtest());
    let mut commands = Commands::default();
    let id = board.read_config(&mut commands, UNIT, CONFIG_ID);
    board.write_config(&mut commands, UNIT, CONFIG_BAR0, u32::try_from(BAR)?);
    board.write_config(&mut commands, UNIT, CONFIG_BAR0 + 4, 0);
    board.write_config(&mut commands, UNIT, CONFIG_COMMAND, COMMAND);
    let found = qtest.send(&commands)?.number(id)? as u32;
    ensure!(found == ID, "{UNIT} is {found:08x}, not a RISC-V IOMMU");
    Ok(machine.registers(BAR).with_local(&[FQH]))
}

impl Invalidator for RiscvIommu<'_> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        match self.stage {
            Stage::FirstOfGuest => self.submit_for_guest(request),
            _ => self.unit.submit(request),
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.unit.poll(ticket)
    }
}

impl Family for RiscvIommu<'_> {
    type Format = RiscV;

    fn format(&self) -> RiscV {
        let format = match self.stage {
            Stage::First | Stage::Process | Stage::FirstOfGuest => RiscV::first_stage(self.levels),
            Stage::Second | Stage::SecondOfGuest => RiscV::second_stage(self.levels),
        };
        format.with_pages_up_to(PageSize::Size2M)
    }

    fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    fn table(&self, id: DomainId) -> anyhow::Result<Option<Table<RiscV>>> {
        let table = self.table_at(self.format(), id)?;
        if self.stage == Stage::SecondOfGuest {
            // The guest's own tables.
            let base = self.ram.range().start();
            self.identity(&table, base, FRAMES)?;
        }
        Ok(Some(table))
    }

    fn attach(&mut self, device: RequesterId, table: &Table<RiscV>) -> anyhow::Result<()> {
        let (domain, translation) = self.translation(table)?;
        let frames = self.frames;
        self.unit.attach(frames, device, domain, &translation)?;
        if self.stage == Stage::Process {
            let own = PageTable {
                root: table.root(),
                levels: self.levels,
            };
            self.unit
                .attach_process(frames, device, 0, domain, own, Privilege::User)?;
        }
        Ok(())
    }

    fn detach(&mut self, device: RequesterId) -> anyhow::Result<()> {
        if self.stage == Stage::Process {
            self.unit.detach_process(self.frames, device, 0)?;
        }
        Ok(self.unit.detach(self.frames, device)?)
    }

    fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        if self.stage != Stage::FirstOfGuest {
            return self.unit.submit_all(requests);
        }
        let mut last = Err(InvalidationError::Unsupported);
        for request in requests {
            last = Ok(self.submit(*request)?);
        }
        last
    }

    /// QEMU records no fault if the entry of a page without the permission was cached: the
    /// translation succeeds, and code outside the model stops the access.
    fn records_permission_faults(&self) -> bool {
        false
    }

    /// QEMU's entries keep 44 bits of the page number.
    fn tag_bits(&self) -> u32 {
        56
    }

    fn fault_registers(&self) -> Vec<RegisterRead> {
        [FQT, FQT, FQCSR, FQT, FQCSR]
            .map(|offset| RegisterRead::Word(BAR + offset))
            .to_vec()
    }

    fn queues_faults(&self) -> bool {
        true
    }

    fn next_fault(&mut self) -> anyhow::Result<Option<Reported>> {
        if self.faults.is_empty() {
            self.take_faults();
        }
        match self.faults.pop_front() {
            None => Ok(None),
            Some(FaultEvent::Record(record)) => Self::decode(&record).map(Some),
            Some(FaultEvent::Lost(_)) => Ok(Some(Reported::Lost)),
            Some(FaultEvent::Malformed(raw)) => bail!("malformed fault record {raw:x?}"),
        }
    }
}
