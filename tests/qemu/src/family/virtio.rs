//! virtio-iommu: `-device virtio-iommu-pci` on q35. The device keeps the mappings; the driver's
//! table is only its own record.

use std::rc::Rc;

use anyhow::{Context, bail};
use ringfence_memory::Frames;
use ringfence_pgtable::{Coherency, Levels, MapRequest, SecondStage, Table};
use ringfence_types::{
    Access, DomainId, Invalidation, InvalidationError, Invalidator, Permissions, PfnRange,
    RequesterId, Ticket,
};
use ringfence_virtio_iommu_driver::{
    FaultReason, FaultRecord, Options, PciCapabilities, Unit, VirtioPci,
};

use crate::family::{Family, Reported};
use crate::machine::Machine;
use crate::qtest::Commands;
use crate::ram::GuestRam;
use crate::registers::QtestRegisters;

/// Requester id of the device, as `addr=1.0` gives it.
pub const DEVICE: RequesterId = RequesterId::new(0x08);
/// Address of the BAR with the structures, beyond those of the test devices.
const BAR: u32 = 0xe000_0000;
const CONFIG_COMMAND: u8 = 0x04;
const CONFIG_BAR0: u8 = 0x10;
/// Memory space and bus master.
const COMMAND: u32 = 0x6;

type JudgedUnit<'m> = Unit<VirtioPci<QtestRegisters>, Rc<GuestRam>, &'m Frames<Rc<GuestRam>>>;

/// The driver of the machine's virtio-iommu.
#[derive(Debug)]
pub struct Virtio<'m> {
    unit: JudgedUnit<'m>,
}

/// Gives the BAR of the device an address, and returns its structures.
fn enable(machine: &Machine) -> anyhow::Result<PciCapabilities> {
    let (qtest, board) = (machine.qtest(), machine.board());
    let read = |offset: u8| {
        let mut commands = Commands::default();
        let index = board.read_config(&mut commands, DEVICE, offset);
        let replies = qtest.send(&commands);
        replies
            .and_then(|replies| replies.number(index))
            .unwrap_or(u64::MAX) as u32
    };
    let found = PciCapabilities::find(read)?;
    let mut commands = Commands::default();
    let low = CONFIG_BAR0 + 4 * found.common.bar;
    board.write_config(&mut commands, DEVICE, low, BAR);
    board.write_config(&mut commands, DEVICE, low + 4, 0);
    board.write_config(&mut commands, DEVICE, CONFIG_COMMAND, COMMAND);
    qtest.send(&commands)?;
    Ok(found)
}

impl<'m> Virtio<'m> {
    /// Starts the driver of the machine's device.
    ///
    /// # Errors
    /// The device is missing or refuses.
    pub fn start(machine: &'m Machine) -> anyhow::Result<Self> {
        let found = enable(machine)?;
        let transport = VirtioPci::new(&found, |location| {
            machine.registers(u64::from(BAR) + u64::from(location.offset))
        });
        let options = Options {
            first_endpoint: 0,
            poll_limit: 1000,
        };
        let unit = Unit::new(transport, machine.ram(), machine.frames(), &options)?;
        Ok(Self { unit })
    }

    /// Returns the unit.
    pub const fn unit(&mut self) -> &mut JudgedUnit<'m> {
        &mut self.unit
    }

    /// Ends the driver.
    ///
    /// # Errors
    /// The device does not reset.
    pub fn stop(self) -> anyhow::Result<()> {
        Ok(self.unit.disable()?)
    }
}

impl Invalidator for Virtio<'_> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.unit.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.unit.poll(ticket)
    }
}

impl Family for Virtio<'_> {
    type Format = SecondStage;

    /// The widest format whose addresses the device maps.
    fn format(&self) -> SecondStage {
        let last = self.unit.capabilities().input_range.last().get();
        let is_inside = |levels: &Levels| (1 << levels.width()) - 1 <= last;
        let widest = Levels::ALL.into_iter().rev().find(is_inside);
        SecondStage::new(widest.unwrap_or(Levels::Three))
    }

    fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    fn mapped(&mut self, domain: DomainId, request: &MapRequest) -> anyhow::Result<()> {
        Ok(self.unit.map(domain, *request)?)
    }

    fn unmapped(&mut self, domain: DomainId, range: PfnRange) -> anyhow::Result<()> {
        // The driver's own token carries the obligation.
        self.unit.unmap(domain, range).map(drop)?;
        Ok(())
    }

    fn attach(&mut self, device: RequesterId, table: &Table<SecondStage>) -> anyhow::Result<()> {
        Ok(self.unit.attach(device, table.domain())?)
    }

    fn detach(&mut self, device: RequesterId) -> anyhow::Result<()> {
        Ok(self.unit.detach(device)?)
    }

    fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        self.unit.submit_all(requests)
    }

    fn translates_byte_below(&self) -> bool {
        true
    }

    /// One event for each word of the access that the device tries to write.
    fn repeats_faults(&self) -> bool {
        true
    }

    fn next_fault(&mut self) -> anyhow::Result<Option<Reported>> {
        let fault = match self.unit.next_fault() {
            None => return Ok(None),
            Some(FaultRecord::Fault(fault)) => fault,
            Some(other) => bail!("malformed event {other:x?}"),
        };
        // QEMU reports an endpoint without a domain as UNKNOWN, not as DOMAIN: a recorded finding.
        if !matches!(fault.reason, FaultReason::Unknown(0) | FaultReason::Mapping) {
            bail!("unexpected reason: {fault:x?}");
        }
        Ok(Some(Reported::Fault {
            device: fault.device.context("no requester id")?,
            iova: fault.iova.context("no address")?,
            // Only accesses that a mapping does not allow have a kind.
            access: match fault.access {
                Some(Permissions::READ) => Some(Access::Read),
                Some(Permissions::WRITE) => Some(Access::Write),
                _ => None,
            },
        }))
    }
}
