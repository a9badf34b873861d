//! The SMMUv3: `qemu-system-aarch64 -M virt,iommu=smmuv3`.

use std::collections::VecDeque;
use std::rc::Rc;

use anyhow::{Context, anyhow, bail, ensure};
use ringfence_memory::Frames;
use ringfence_pgtable::{Arm, Coherency, Granule4K, Table};
use ringfence_smmu_v3::{
    Capabilities, EventRecord, EventType, FaultEvent, Loss, Options, PageTable, Translation, Unit,
};
use ringfence_types::{
    DomainId, Invalidation, InvalidationError, Invalidator, Iova, PageSize, PhysAddr, PhysRange,
    Registers, RequesterId, Ticket,
};

use super::{Family, Reported};
use crate::machine::Machine;
use crate::qtest::RegisterRead;
use crate::ram::GuestRam;
use crate::registers::QtestRegisters;

/// Address of the registers.
const BASE: u64 = 0x0905_0000;
const IDR3: u64 = 0xc;
const IDR3_RIL: u32 = 1 << 10;
const GERROR: u64 = 0x60;
const EVENTQ_PROD: u64 = 0x1_00a8;
/// EVENTQ_CONS and GERRORN.
const LOCAL: &[u64] = &[0x1_00ac, 0x64];

/// The stage that the driver's tables are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Tables of stage 1.
    One,
    /// Tables of stage 2.
    Two,
}

/// The registers of QEMU's unit, without the features that a test takes away.
#[derive(Debug, Clone)]
pub struct SmmuRegisters {
    registers: QtestRegisters,
    has_ranges: bool,
}

impl SmmuRegisters {
    /// Returns the registers of the unit of `machine`. Without `has_ranges` the unit does not
    /// report invalidation of ranges.
    pub fn new(machine: &Machine, has_ranges: bool) -> Self {
        Self {
            registers: machine.registers(BASE).with_local(LOCAL),
            has_ranges,
        }
    }
}

impl Registers for SmmuRegisters {
    fn read32(&self, offset: u64) -> u32 {
        let raw = self.registers.read32(offset);
        match offset {
            IDR3 if !self.has_ranges => raw & !IDR3_RIL,
            _ => raw,
        }
    }

    fn read64(&self, offset: u64) -> u64 {
        self.registers.read64(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.registers.write32(offset, value);
    }

    fn write64(&self, offset: u64, value: u64) {
        self.registers.write64(offset, value);
    }
}

/// The driver of the unit of a machine.
pub type JudgedUnit<'m> = Unit<SmmuRegisters, Rc<GuestRam>, &'m Frames<Rc<GuestRam>>>;

/// The configuration of a unit and of its tables.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// The stage of the tables.
    pub stage: Stage,
    /// The format of the tables.
    pub format: Arm<Granule4K>,
    /// Bits of the stream ids. More than six need a stream table of two levels.
    pub stream_id_bits: u32,
    /// Use invalidation of ranges.
    pub has_ranges: bool,
}

/// The driver's unit on QEMU's registers.
#[derive(Debug)]
pub struct SmmuV3<'m> {
    unit: JudgedUnit<'m>,
    ram: Rc<GuestRam>,
    frames: &'m Frames<Rc<GuestRam>>,
    setting: Setting,
    /// Fault records that the driver has not taken.
    faults: VecDeque<FaultEvent>,
}

impl<'m> SmmuV3<'m> {
    /// Starts the driver of the machine's unit.
    ///
    /// # Errors
    /// The machine has no unit, or the unit fails.
    pub fn start(machine: &'m Machine, setting: Setting) -> anyhow::Result<Self> {
        let registers = SmmuRegisters::new(machine, setting.has_ranges);
        let table = stream_table(machine, &registers, setting.stream_id_bits)?;
        let options = Options {
            poll_limit: 1000,
            ..Options::new(table, setting.stream_id_bits)
        };
        let unit = Unit::new(registers, machine.ram(), machine.frames(), &options)?;
        Ok(Self {
            unit,
            ram: machine.ram(),
            frames: machine.frames(),
            setting,
            faults: VecDeque::new(),
        })
    }

    /// Returns the unit.
    pub const fn unit(&mut self) -> &mut JudgedUnit<'m> {
        &mut self.unit
    }

    /// Ends the driver.
    ///
    /// # Errors
    /// The unit fails.
    pub fn stop(self) -> anyhow::Result<()> {
        self.unit.disable().map_err(|(_, error)| error.into())
    }

    /// Takes all records from the unit. QEMU translates the parts of some accesses one by one, and
    /// records the fault of a page each time, as the specification allows.
    fn take_faults(&mut self) {
        while let Some(event) = self.unit.next_fault() {
            let is_same = |last: &FaultEvent| match (last, &event) {
                (FaultEvent::Record(last), FaultEvent::Record(next)) => {
                    let key = |record: &EventRecord| {
                        let page = record
                            .transaction
                            .map(|it| it.address.get() / PageSize::Size4K.bytes());
                        (record.stream_id, record.event_type, page)
                    };
                    key(last) == key(next)
                }
                _ => false,
            };
            if !self.faults.back().is_some_and(is_same) {
                self.faults.push_back(event);
            }
        }
    }

    fn decode(&self, record: &EventRecord) -> anyhow::Result<Reported> {
        let requester = self.unit.requester(record.stream_id);
        let device = requester.with_context(|| format!("no requester: {record:x?}"))?;
        let is_last = self.faults.is_empty();
        match (record.event_type, record.transaction) {
            // No device is attached: the entry is not valid, or the table does not reach it.
            (EventType::BadStreamEntry | EventType::BadStreamId, None) => {
                Ok(Reported::Stopped { device, is_last })
            }
            (
                EventType::Translation | EventType::Permission | EventType::AddressSize,
                Some(access),
            ) => {
                let is_stage2 = record.stage.is_some_and(|stage| stage.is_stage2);
                ensure!(
                    is_stage2 == (self.setting.stage == Stage::Two),
                    "wrong stage: {record:x?}"
                );
                Ok(Reported::Fault {
                    device,
                    iova: access.address,
                    access: Some(access.access),
                })
            }
            _ => bail!("unexpected fault {record:x?}"),
        }
    }
}

/// Returns memory for the stream table.
///
/// # Errors
/// The machine has no unit, or no memory is left.
pub fn stream_table(
    machine: &Machine,
    registers: &SmmuRegisters,
    bits: u32,
) -> anyhow::Result<PhysRange> {
    let capabilities = Capabilities::read(registers).context("no unit")?;
    let bytes = capabilities.stream_table_bytes(bits, PageSize::Size4K);
    let frames = bytes.div_ceil(PageSize::Size4K.bytes());
    let start: PhysAddr = machine.frames().alloc_contiguous(frames)?;
    PhysRange::new(start, bytes).context("no stream table")
}

impl Invalidator for SmmuV3<'_> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.unit.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.unit.poll(ticket)
    }
}

impl Family for SmmuV3<'_> {
    type Format = Arm<Granule4K>;

    fn format(&self) -> Arm<Granule4K> {
        self.setting.format
    }

    fn coherency(&self) -> Coherency {
        self.unit.coherency()
    }

    fn table(&self, id: DomainId) -> anyhow::Result<Option<Table<Self::Format>>> {
        let bytes = Table::root_bytes_of(&self.setting.format);
        let pages = bytes.div_ceil(PageSize::Size4K.bytes());
        if pages == 1 {
            return Ok(None);
        }
        // Stage 2 concatenates tables at its root.
        let root = self.frames.alloc_contiguous(pages)?;
        let format = self.setting.format;
        Table::at(format, id, self.coherency(), &self.ram, root)
            .map(Some)
            .map_err(|error| anyhow!("no table: {error}"))
    }

    fn attach(&mut self, device: RequesterId, table: &Table<Self::Format>) -> anyhow::Result<()> {
        let own = PageTable::of(table);
        let translation = match self.setting.stage {
            Stage::One => Translation::Stage1(own),
            Stage::Two => Translation::Stage2(own),
        };
        Ok(self.unit.attach(device, table.domain(), &translation)?)
    }

    fn detach(&mut self, device: RequesterId) -> anyhow::Result<()> {
        Ok(self.unit.detach(device)?)
    }

    fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        self.unit.submit_all(requests)
    }

    /// QEMU records no fault of a read if a write-only entry of stage 2 was cached: it compares
    /// only writes with the entry, and code outside the model stops the read. Stage 1 has no such
    /// entries.
    fn records_permission_faults(&self) -> bool {
        self.setting.stage == Stage::One
    }

    /// QEMU does not record the stage 1 fault of an address beyond the intermediate addresses when
    /// stage 1 is bypassed.
    fn records_faults_at(&self, iova: Iova) -> bool {
        let bits = self.unit.capabilities().intermediate_address_bits();
        self.setting.stage == Stage::One || iova.get() >> bits == 0
    }

    fn fault_registers(&self) -> Vec<RegisterRead> {
        [EVENTQ_PROD, EVENTQ_PROD, GERROR, EVENTQ_PROD, GERROR]
            .map(|offset| RegisterRead::Word(BASE + offset))
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
            Some(FaultEvent::Record(record)) => self.decode(&record).map(Some),
            // QEMU reports a full queue as an aborted write.
            Some(FaultEvent::Lost(Loss::Overflow | Loss::Abort)) => Ok(Some(Reported::Lost)),
            Some(other) => bail!("unexpected event {other:x?}"),
        }
    }
}
