//! I/O page tables of assigned devices, and the context entries that refer to them.

use std::io;
use std::sync::Arc;

use ringfence_memory::Arena;
use ringfence_pgtable::{Coherency, Levels, SecondStage};
use ringfence_pviommu::backend::{DeviceSlot, HardwareTables, IoError, IoTables, TablesHandle};
use ringfence_types::{Direction, DomainId, Iova, PhysAddr, RequesterId};
use vm_memory::GuestMemoryMmap;

use super::Hardware;
use super::hardware::InvalidationPort;
use crate::host::HostFrames;

/// A hardware table and a domain for each device. A [`DeviceSlot`] is the index of a device here.
#[derive(Debug)]
pub(crate) struct AssignedTables {
    hardware: Arc<Hardware>,
    tables: HardwareTables<Arc<Arena>, HostFrames, InvalidationPort>,
    devices: Vec<RequesterId>,
}

impl AssignedTables {
    /// Creates empty tables for `devices`, all blocked.
    ///
    /// # Errors
    /// The host has no memory for the tables.
    pub(crate) fn new(hardware: &Arc<Hardware>, devices: &[RequesterId]) -> io::Result<Self> {
        let domains: Vec<DomainId> = (1..).take(devices.len()).map(DomainId::new).collect();
        let host = hardware.host();
        let tables = HardwareTables::new(
            Arc::clone(host.memory()),
            host.io_tables().clone(),
            InvalidationPort(Arc::clone(hardware)),
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

    /// Returns the hardware that walks the tables.
    pub(crate) fn hardware(&self) -> &Arc<Hardware> {
        &self.hardware
    }

    /// Returns true if `device` has a table.
    pub(crate) fn has(&self, device: RequesterId) -> bool {
        self.devices.contains(&device)
    }

    /// Attaches each device to its table.
    pub(crate) fn attach(&self) {
        for (device, index) in self.devices.iter().zip(0..) {
            let context = self.tables.context(DeviceSlot::new(index));
            self.hardware.set_context(*device, context.as_ref());
        }
    }

    /// Blocks all devices. When it returns, no access is in progress.
    pub(crate) fn detach(&self) {
        for device in &self.devices {
            self.hardware.set_context(*device, None);
        }
    }

    /// Replaces the guest's memory. When it returns, no device can access the old memory.
    pub(crate) fn set_memory(&self, memory: &GuestMemoryMmap) {
        self.hardware.set_memory(memory);
    }
}

impl TablesHandle for AssignedTables {
    type Handle<'t> = &'t mut Self;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl IoTables for AssignedTables {
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        self.tables.map(device, giova, frame, direction)
    }

    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        self.tables.unmap(device, giova)
    }

    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError> {
        self.tables.commit(device)
    }
}
