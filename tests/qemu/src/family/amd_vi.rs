//! AMD-Vi: `-device amd-iommu,dma-remap=on` on q35.

use std::rc::Rc;

use anyhow::{Context, bail};
use ringfence_amd_vi::{Event, Interrupts, Options, Stage, Unit, device_table_bytes};
use ringfence_memory::Frames;
use ringfence_pgtable::{AmdV1, Coherency, Format, Table};
use ringfence_types::{
    Invalidation, InvalidationError, Invalidator, PhysRange, RequesterId, Ticket,
};

use crate::family::{Family, Reported};
use crate::machine::Machine;
use crate::qtest::{Commands, RegisterRead};
use crate::ram::GuestRam;
use crate::registers::QtestRegisters;

/// Address of the registers.
const BASE: u64 = 0xfed8_0000;
const EVENT_HEAD: u64 = 0x2010;
const EVENT_TAIL: u64 = 0x2018;
const STATUS: u64 = 0x2020;
/// QEMU's AMDVI-PCI, the function with the capability block.
const VENDOR_AND_DEVICE: u32 = 0x1022;
const CAPABILITY_ID: u32 = 0xf;
/// Most records in the log.
const FULL: u32 = 255;
/// The largest requester id of bus 0.
const LARGEST: RequesterId = RequesterId::new(0xff);

/// The unit of a machine.
pub type JudgedUnit<'m> = Unit<QtestRegisters, Rc<GuestRam>, &'m Frames<Rc<GuestRam>>>;

/// A unit and the format of its tables.
#[derive(Debug)]
pub struct AmdVi<'m> {
    unit: JudgedUnit<'m>,
    format: AmdV1,
    /// Records read since the log was last empty, as far as the driver knows.
    records: u32,
}

impl<'m> AmdVi<'m> {
    /// Starts the driver of the machine's unit.
    ///
    /// # Errors
    /// The machine has no unit, or the unit fails.
    pub fn start(machine: &'m Machine, format: AmdV1) -> anyhow::Result<Self> {
        let bytes = device_table_bytes(LARGEST);
        let table = machine.frames().alloc_contiguous(bytes >> 12)?;
        let options = Options {
            capability_header: capability_header(machine)?,
            ivhd_flags: 0,
            device_table: PhysRange::new(table, bytes).context("no device table")?,
            interrupts: Interrupts::Pass,
            poll_limit: 1000,
        };
        let registers = machine.registers(BASE).with_local(&[EVENT_HEAD, STATUS]);
        let unit = Unit::new(registers, machine.ram(), machine.frames(), &options)?;
        Ok(Self {
            unit,
            format,
            records: 0,
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
        Ok(self.unit.disable()?)
    }
}

/// Finds the unit's function on bus 0, and reads dword 0 of its capability block.
fn capability_header(machine: &Machine) -> anyhow::Result<u32> {
    for device in 0..32 {
        let device = RequesterId::from_parts(0, device, 0).context("no device")?;
        if read_config(machine, device, 0)? & 0xffff != VENDOR_AND_DEVICE {
            continue;
        }
        let mut at = read_config(machine, device, 0x34)? as u8;
        for _ in 0..48 {
            let header = read_config(machine, device, at & !3)?;
            if header & 0xff == CAPABILITY_ID {
                return Ok(header);
            }
            at = (header >> 8) as u8;
        }
    }
    bail!("no function of bus 0 has the capability block of an IOMMU")
}

fn read_config(machine: &Machine, device: RequesterId, offset: u8) -> anyhow::Result<u32> {
    let mut commands = Commands::default();
    let board = machine.board();
    let read = board.read_config(&mut commands, device, offset);
    Ok(machine.qtest().send(&commands)?.number(read)? as u32)
}

impl Invalidator for AmdVi<'_> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.unit.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.unit.poll(ticket)
    }
}

impl Family for AmdVi<'_> {
    type Format = AmdV1;

    fn format(&self) -> AmdV1 {
        self.format
    }

    fn coherency(&self) -> Coherency {
        self.unit.coherency()
    }

    fn invalidates_after_map(&self) -> bool {
        self.unit.invalidates_after_map()
    }

    fn attach(&mut self, device: RequesterId, table: &Table<AmdV1>) -> anyhow::Result<()> {
        let stage = Stage::Host {
            root: table.root(),
            levels: table.format().root_level(),
        };
        Ok(self.unit.attach(device, table.domain(), stage)?)
    }

    fn detach(&mut self, device: RequesterId) -> anyhow::Result<()> {
        Ok(self.unit.detach(device)?)
    }

    fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        self.unit.submit_all(requests)
    }

    fn fault_registers(&self) -> Vec<RegisterRead> {
        [EVENT_TAIL, EVENT_TAIL, STATUS, EVENT_TAIL]
            .map(|offset| RegisterRead::Word(BASE + offset))
            .to_vec()
    }

    fn queues_faults(&self) -> bool {
        true
    }

    fn next_fault(&mut self) -> anyhow::Result<Option<Reported>> {
        let Some(record) = self.unit.next_fault() else {
            self.records = 0;
            return Ok(None);
        };
        self.records += 1;
        // A full log may have lost records: the driver reports that when it finds the log empty.
        let is_last = !self.unit.has_known_fault() && self.records < FULL;
        if is_last {
            self.records = 0;
        }
        match record.event {
            // QEMU 11.1 sets I, NX instead of RW, and no address.
            Event::IoPageFault { request, .. } => Ok(Some(Reported::Stopped {
                device: request.device,
                is_last,
            })),
            Event::Lost => Ok(Some(Reported::Lost)),
            _ => bail!("{record}: {:x?}", record.raw),
        }
    }
}
