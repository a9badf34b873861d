//! Tables of a guest with assigned and simulated devices.

use alloc::vec::Vec;

use ringfence_types::{Direction, Iova, PhysAddr};

use super::{DeviceSlot, IoError, IoTables, TablesHandle};

/// The tables that serve a device, and its slot in them.
#[derive(Debug, Clone, Copy)]
enum Side {
    Assigned(DeviceSlot),
    Simulated(DeviceSlot),
}

/// Two kinds of tables behind one interface.
#[derive(Debug)]
pub struct AnyTables<A, B> {
    assigned: A,
    simulated: B,
    sides: Vec<Side>,
}

impl<A: IoTables, B: IoTables> AnyTables<A, B> {
    /// Combines `assigned` and `simulated`. `is_assigned` is true for each assigned device, in the
    /// order of slots. Each kind numbers its own devices.
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

    /// Tables of assigned devices.
    pub const fn assigned(&mut self) -> &mut A {
        &mut self.assigned
    }

    /// Tables of simulated devices.
    pub const fn simulated(&mut self) -> &mut B {
        &mut self.simulated
    }

    fn side(&self, device: DeviceSlot) -> Result<Side, IoError> {
        let side = self.sides.get(device.index());
        side.copied().ok_or(IoError::Failed)
    }
}

/// Exclusive access to the [`AnyTables`] of a backend:
/// [`Backend::tables`](super::Backend::tables).
#[derive(Debug)]
pub struct AnyTablesMut<'t, A, B> {
    tables: &'t mut AnyTables<A, B>,
}

impl<'t, A: TablesHandle, B: TablesHandle> AnyTablesMut<'t, A, B> {
    /// Returns the handle to the tables of assigned devices.
    pub fn assigned(self) -> A::Handle<'t> {
        self.tables.assigned.handle()
    }

    /// Returns the handle to the tables of simulated devices.
    pub fn simulated(self) -> B::Handle<'t> {
        self.tables.simulated.handle()
    }
}

impl<A: TablesHandle, B: TablesHandle> TablesHandle for AnyTables<A, B> {
    type Handle<'t>
        = AnyTablesMut<'t, A, B>
    where
        Self: 't;

    fn handle(&mut self) -> AnyTablesMut<'_, A, B> {
        AnyTablesMut { tables: self }
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
