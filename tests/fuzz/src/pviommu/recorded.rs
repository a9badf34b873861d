//! I/O page tables that only record mappings, and panic on calls that no backend may make.

use std::collections::BTreeMap;

use ringfence_pviommu::backend::{DeviceSlot, IoError, IoTables, TablesHandle};
use ringfence_types::{Direction, Iova, PhysAddr};

/// The current mappings.
#[derive(Default)]
pub(crate) struct Recorded(pub(crate) BTreeMap<(DeviceSlot, Iova), (PhysAddr, Direction)>);

impl TablesHandle for Recorded {
    type Handle<'t> = &'t mut Self;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl IoTables for Recorded {
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        let old = self.0.insert((device, giova), (frame, direction));
        assert_eq!(old, None, "{giova} is mapped twice");
        Ok(())
    }

    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        let old = self.0.remove(&(device, giova));
        assert!(old.is_some(), "{giova} is not mapped");
        Ok(())
    }

    fn commit(&mut self, _: DeviceSlot) -> Result<(), IoError> {
        Ok(())
    }
}
