//! Assigned and simulated devices of one guest.

use alloc::vec::Vec;

use ringfence_types::{Direction, Iova, PhysAddr};

use super::{DeviceSlot, IoError, IoTables};

/// Where a device's table is.
#[derive(Debug, Clone, Copy)]
enum Side {
    Assigned(DeviceSlot),
    Simulated(DeviceSlot),
}

/// Two kinds of tables behind one.
#[derive(Debug)]
pub struct AnyTables<A, B> {
    assigned: A,
    simulated: B,
    sides: Vec<Side>,
}

impl<A: IoTables, B: IoTables> AnyTables<A, B> {
    /// `is_assigned` says of each device, in the order of slots, whether it is among those of
    /// `assigned`; each side counts its own.
    pub fn new(assigned: A, simulated: B, is_assigned: impl IntoIterator<Item = bool>) -> Self {
        let (mut of_assigned, mut of_simulated) = (0, 0);
        let next = |count: &mut u32| {
            let slot = DeviceSlot::new(*count);
            *count = count.saturating_add(1);
            slot
        };
        let sides = is_assigned.into_iter().map(|is_assigned| {
            if is_assigned {
                Side::Assigned(next(&mut of_assigned))
            } else {
                Side::Simulated(next(&mut of_simulated))
            }
        });
        Self {
            sides: sides.collect(),
            assigned,
            simulated,
        }
    }

    /// The tables of assigned devices.
    pub const fn assigned(&mut self) -> &mut A {
        &mut self.assigned
    }

    /// The tables of simulated ones.
    pub const fn simulated(&mut self) -> &mut B {
        &mut self.simulated
    }

    fn side(&self, device: DeviceSlot) -> Result<Side, IoError> {
        let side = self.sides.get(device.index());
        side.copied().ok_or(IoError::Failed)
    }
}

impl<A: IoTables, B: IoTables> IoTables for AnyTables<A, B> {
    #[inline]
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        match self.side(device)? {
            Side::Assigned(slot) => self.assigned.map(slot, giova, frame, direction),
            Side::Simulated(slot) => self.simulated.map(slot, giova, frame, direction),
        }
    }

    #[inline]
    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        match self.side(device)? {
            Side::Assigned(slot) => self.assigned.unmap(slot, giova),
            Side::Simulated(slot) => self.simulated.unmap(slot, giova),
        }
    }

    #[inline]
    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError> {
        match self.side(device)? {
            Side::Assigned(slot) => self.assigned.commit(slot),
            Side::Simulated(slot) => self.simulated.commit(slot),
        }
    }
}
