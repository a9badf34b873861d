//! The assigned devices' side of the tables, which most guests have none of.

use std::io;
use std::sync::Arc;

use ringfence_pviommu::backend::{IoError, IoTables, Slot};
use ringfence_types::{DeviceId, Direction, Iova, PhysAddr};
use vm_memory::GuestMemoryMmap;

use crate::assigned::{Hardware, Tables};

/// Their tables, if there is hardware.
pub(super) struct Assigned(Option<Tables>);

impl Assigned {
    /// Those of `devices`, which reach nothing.
    pub(super) fn new(hardware: Option<&Arc<Hardware>>, devices: &[DeviceId]) -> io::Result<Self> {
        let tables = hardware.map(|hardware| Tables::new(hardware, devices));
        Ok(Self(tables.transpose()?))
    }

    pub(super) fn hardware_of(&self, device: DeviceId) -> Option<Arc<Hardware>> {
        let tables = self.0.as_ref().filter(|tables| tables.has(device))?;
        Some(Arc::clone(tables.hardware()))
    }

    /// Each device reaches what its table maps.
    pub(super) fn attach(&self) {
        self.0.iter().for_each(Tables::attach);
    }

    /// When it returns, no device reaches anything.
    pub(super) fn detach(&self) {
        self.0.iter().for_each(Tables::detach);
    }

    /// When it returns, no device reaches anything of the memory before.
    pub(super) fn set_memory(&self, memory: &GuestMemoryMmap) {
        self.0.iter().for_each(|tables| tables.set_memory(memory));
    }

    fn tables(&mut self) -> Result<&mut Tables, IoError> {
        self.0.as_mut().ok_or(IoError::Failed)
    }
}

impl IoTables for Assigned {
    fn map(
        &mut self,
        device: Slot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        self.tables()?.map(device, giova, frame, direction)
    }

    fn unmap(&mut self, device: Slot, giova: Iova) -> Result<(), IoError> {
        self.tables()?.unmap(device, giova)
    }

    fn settle(&mut self, device: Slot) -> Result<(), IoError> {
        self.tables()?.settle(device)
    }
}
