//! I/O page tables of assigned devices, and the contexts that lead to them.

use std::io;
use std::sync::Arc;

use ringfence_memory::Arena;
use ringfence_pgtable::{Coherency, Levels, SecondStage};
use ringfence_pviommu::backend::{DeviceSlot, HardwareTables, IoError, IoTables};
use ringfence_types::{Direction, DomainId, Iova, PhysAddr, RequesterId};
use vm_memory::GuestMemoryMmap;

use super::Hardware;
use super::hardware::InvalidationPort;
use crate::host::HostFrames;

/// A table of the hardware's for each device, with a domain of its own. A [`DeviceSlot`] is a
/// device's place among these.
#[derive(Debug)]
pub(crate) struct AssignedTables {
    hardware: Arc<Hardware>,
    tables: HardwareTables<Arc<Arena>, HostFrames, InvalidationPort>,
    devices: Vec<RequesterId>,
}

impl AssignedTables {
    /// Empty ones for `devices`, which reach nothing.
    ///
    /// # Errors
    /// The host has no memory for them.
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

    /// The hardware that walks them.
    pub(crate) fn hardware(&self) -> &Arc<Hardware> {
        &self.hardware
    }

    /// Whether `device` has one.
    pub(crate) fn has(&self, device: RequesterId) -> bool {
        self.devices.contains(&device)
    }

    /// Each device reaches what its table maps.
    pub(crate) fn attach(&self) {
        for (device, index) in self.devices.iter().zip(0..) {
            let context = self.tables.context(DeviceSlot::new(index));
            self.hardware.set_context(*device, context.as_ref());
        }
    }

    /// When it returns, no device reaches anything.
    pub(crate) fn detach(&self) {
        for device in &self.devices {
            self.hardware.set_context(*device, None);
        }
    }

    /// When it returns, no device reaches anything of the memory before.
    pub(crate) fn set_memory(&self, memory: &GuestMemoryMmap) {
        self.hardware.set_memory(memory);
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
