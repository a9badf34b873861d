//! I/O page tables that only remember, and punish what no backend may do.

use std::collections::BTreeMap;

use ringfence_pviommu::backend::{IoError, IoTables, Slot};
use ringfence_types::{Direction, Iova, PhysAddr};

/// What is mapped.
#[derive(Default)]
pub(crate) struct Recorded(pub(crate) BTreeMap<(Slot, Iova), (PhysAddr, Direction)>);

impl IoTables for Recorded {
    fn map(
        &mut self,
        device: Slot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        let old = self.0.insert((device, giova), (frame, direction));
        assert_eq!(old, None, "{giova} is mapped twice");
        Ok(())
    }

    fn unmap(&mut self, device: Slot, giova: Iova) -> Result<(), IoError> {
        let old = self.0.remove(&(device, giova));
        assert!(old.is_some(), "{giova} is not mapped");
        Ok(())
    }

    fn settle(&mut self, _: Slot) -> Result<(), IoError> {
        Ok(())
    }
}
