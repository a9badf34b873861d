//! I/O page tables of assigned devices, and the contexts that lead to them.

use std::io;
use std::sync::Arc;

use ringfence_memory::Arena;
use ringfence_pgtable::{Coherency, Levels, SecondStage};
use ringfence_pviommu::backend::{HardwareTables, IoError, IoTables, Slot};
use ringfence_types::{DeviceId, Direction, DomainId, Iova, PhysAddr};
use vm_memory::GuestMemoryMmap;

use super::Hardware;
use super::hardware::Port;
use crate::host::Source;

/// A table of the hardware's for each device, with a domain of its own. A [`Slot`] is a device's place among these.
#[derive(Debug)]
pub(crate) struct Tables {
    hardware: Arc<Hardware>,
    tables: HardwareTables<Arc<Arena>, Source, Port>,
    devices: Vec<DeviceId>,
}

impl Tables {
    /// Empty ones for `devices`, which reach nothing.
    ///
    /// # Errors
    /// The host has no memory for them.
    pub(crate) fn new(hardware: &Arc<Hardware>, devices: &[DeviceId]) -> io::Result<Self> {
        let domains: Vec<DomainId> = (1..).take(devices.len()).map(DomainId::new).collect();
        let host = hardware.host();
        let tables = HardwareTables::new(
            Arc::clone(host.memory()),
            host.io_tables().clone(),
            Port(Arc::clone(hardware)),
            SecondStage::new(Levels::Four),
            Coherency::Coherent,
            &domains,
        );
        Ok(Self {
            hardware: Arc::clone(hardware),
            tables: tables.map_err(io::Error::other)?,
            devices: devices.to_vec(),
        })
    }

    /// The hardware that walks them.
    pub(crate) fn hardware(&self) -> &Arc<Hardware> {
        &self.hardware
    }

    /// Whether `device` has one.
    pub(crate) fn has(&self, device: DeviceId) -> bool {
        self.devices.contains(&device)
    }

    /// Each device reaches what its table maps.
    pub(crate) fn attach(&self) {
        for (device, index) in self.devices.iter().zip(0..) {
            let context = self.tables.context(Slot::new(index));
            self.hardware.direct(*device, context.as_ref());
        }
    }

    /// When it returns, no device reaches anything.
    pub(crate) fn detach(&self) {
        for device in &self.devices {
            self.hardware.direct(*device, None);
        }
    }

    /// When it returns, no device reaches anything of the memory before.
    pub(crate) fn set_memory(&self, memory: &GuestMemoryMmap) {
        self.hardware.set_memory(memory);
    }
}

impl IoTables for Tables {
    fn map(
        &mut self,
        device: Slot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        self.tables.map(device, giova, frame, direction)
    }

    fn unmap(&mut self, device: Slot, giova: Iova) -> Result<(), IoError> {
        self.tables.unmap(device, giova)
    }

    fn settle(&mut self, device: Slot) -> Result<(), IoError> {
        self.tables.settle(device)
    }
}
