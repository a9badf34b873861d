//! Intel VT-d: `-device intel-iommu` on q35.

use std::rc::Rc;

use anyhow::{anyhow, bail};
use ringfence_memory::Frames;
use ringfence_pgtable::{Coherency, FirstStage, Format, Levels, SecondStage, Table};
use ringfence_types::{Access, Invalidation, InvalidationError, Invalidator, RequesterId, Ticket};
use ringfence_vtd::{FaultRecord, Options, Request, Translation, Unit};

use crate::family::{Family, Reported};
use crate::machine::Machine;
use crate::qtest::{Commands, RegisterRead};
use crate::ram::GuestRam;
use crate::registers::QtestRegisters;

/// Address of the registers.
const BASE: u64 = 0xfed9_0000;
const FSTS: u64 = 0x34;
/// The upper half of QEMU's only fault record.
const RECORD_HIGH: u64 = 0x228;
/// RECORD_HIGH: the record is valid. A write of 1 clears it.
const F: u64 = 1 << 63;

type JudgedUnit<'m> = Unit<QtestRegisters, Rc<GuestRam>, &'m Frames<Rc<GuestRam>>>;

/// A format whose tables a VT-d unit walks.
pub trait Stage: Format {
    /// Returns the translation through the table with root `table`.
    fn translation(table: &Table<Self>) -> Translation;
}

impl Stage for SecondStage {
    fn translation(table: &Table<Self>) -> Translation {
        Translation::SecondStage {
            root: table.root(),
            levels: levels(table.format()),
        }
    }
}

impl Stage for FirstStage {
    fn translation(table: &Table<Self>) -> Translation {
        Translation::FirstStage {
            root: table.root(),
            levels: levels(table.format()),
        }
    }
}

fn levels(format: &impl Format) -> Levels {
    let mut all = Levels::ALL.into_iter();
    all.find(|levels| levels.width() == format.width())
        .unwrap_or(Levels::Four)
}

/// A unit and the format of its tables.
#[derive(Debug)]
pub struct Vtd<'m, T> {
    unit: JudgedUnit<'m>,
    format: T,
}

impl<'m, T: Stage> Vtd<'m, T> {
    /// Starts the driver of the machine's unit.
    ///
    /// # Errors
    /// The unit refuses the options or fails.
    pub fn start(machine: &'m Machine, options: &Options, format: T) -> anyhow::Result<Self> {
        let registers = machine.registers(BASE).with_local(&[FSTS, RECORD_HIGH]);
        let unit = Unit::new(registers, machine.ram(), machine.frames(), options)?;
        Ok(Self { unit, format })
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

impl<T> Invalidator for Vtd<'_, T> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.unit.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.unit.poll(ticket)
    }
}

impl<T: Stage> Family for Vtd<'_, T> {
    type Format = T;

    fn format(&self) -> T {
        self.format
    }

    fn coherency(&self) -> Coherency {
        self.unit.coherency()
    }

    fn invalidates_after_map(&self) -> bool {
        self.unit.invalidates_after_map()
    }

    fn attach(&mut self, device: RequesterId, table: &Table<T>) -> anyhow::Result<()> {
        let translation = T::translation(table);
        Ok(self.unit.attach(device, table.domain(), translation)?)
    }

    fn detach(&mut self, device: RequesterId) -> anyhow::Result<()> {
        Ok(self.unit.detach(device)?)
    }

    fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        self.unit.submit_all(requests)
    }

    fn fault_registers(&self) -> Vec<RegisterRead> {
        let record = BASE + self.unit.capabilities().fault_records_at;
        vec![
            RegisterRead::Word(BASE + FSTS),
            RegisterRead::Double(record + 8),
            RegisterRead::Double(record),
        ]
    }

    fn queues_faults(&self) -> bool {
        let capabilities = self.unit.capabilities();
        capabilities.fault_records == 1 && capabilities.fault_records_at + 8 == RECORD_HIGH
    }

    fn remove_fault(&self, commands: &mut Commands) -> Vec<RegisterRead> {
        commands.write64(BASE + RECORD_HIGH, F);
        vec![RegisterRead::Word(BASE + FSTS)]
    }

    fn next_fault(&mut self) -> anyhow::Result<Option<Reported>> {
        let fault = match self.unit.next_fault() {
            None => return Ok(None),
            Some(FaultRecord::Lost) => return Ok(Some(Reported::Lost)),
            Some(FaultRecord::Malformed(raw)) => bail!("malformed fault record {raw:x?}"),
            Some(FaultRecord::Interrupt(fault)) => {
                bail!("fault of an interrupt request {fault:x?}")
            }
            Some(FaultRecord::Fault(fault)) => fault,
        };
        let access = match fault.request {
            Request::Read => Access::Read,
            Request::Write => Access::Write,
            other => return Err(anyhow!("fault record of a request {other:?}")),
        };
        Ok(Some(Reported::Fault {
            device: fault.device,
            iova: fault.page,
            access: Some(access),
        }))
    }
}
