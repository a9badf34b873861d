//! The registers of a unit in QEMU.

use std::rc::Rc;

use ringfence_types::Registers;
use ringfence_virtio_iommu_driver::NarrowRegisters;

use crate::qtest::{Commands, Qtest, RegisterRead};

/// The registers of the unit at `base`.
///
/// Writes are posted: they cost no round trip, and take effect before the next access to registers
/// or look-up in RAM. Writes of [local](Self::with_local) registers wait for the next message. A
/// failure of the connection is reported by the next access of a test device. Registers then read
/// as all ones.
#[derive(Debug, Clone)]
pub struct QtestRegisters {
    qtest: Rc<Qtest>,
    base: u64,
    local: &'static [u64],
}

impl QtestRegisters {
    /// Accesses the registers at `base` through `qtest`.
    pub const fn new(qtest: Rc<Qtest>, base: u64) -> Self {
        Self {
            qtest,
            base,
            local: &[],
        }
    }

    /// Tells the offsets of registers whose writes neither read nor write RAM, such as the head of
    /// a queue of fault records.
    #[must_use]
    pub const fn with_local(mut self, local: &'static [u64]) -> Self {
        self.local = local;
        self
    }

    fn write(&self, offset: u64, add: impl FnOnce(&mut Commands) -> usize) {
        let mut commands = Commands::default();
        add(&mut commands);
        match self.local.contains(&offset) {
            true => self.qtest.defer(&commands),
            false => self.qtest.post(&commands),
        }
    }
}

impl Registers for QtestRegisters {
    fn read32(&self, offset: u64) -> u32 {
        let read = RegisterRead::Word(self.base + offset);
        self.qtest.read(read).map_or(u32::MAX, |value| value as u32)
    }

    fn read64(&self, offset: u64) -> u64 {
        let read = RegisterRead::Double(self.base + offset);
        self.qtest.read(read).unwrap_or(u64::MAX)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(offset, |commands| {
            commands.write32(self.base + offset, value)
        });
    }

    fn write64(&self, offset: u64, value: u64) {
        self.write(offset, |commands| {
            commands.write64(self.base + offset, value)
        });
    }
}

impl NarrowRegisters for QtestRegisters {
    fn read8(&self, offset: u64) -> u8 {
        let read = RegisterRead::Byte(self.base + offset);
        self.qtest.read(read).map_or(u8::MAX, |value| value as u8)
    }

    fn read16(&self, offset: u64) -> u16 {
        let read = RegisterRead::Half(self.base + offset);
        self.qtest.read(read).map_or(u16::MAX, |value| value as u16)
    }

    fn write8(&self, offset: u64, value: u8) {
        self.write(offset, |commands| {
            commands.write8(self.base + offset, value)
        });
    }

    fn write16(&self, offset: u64, value: u16) {
        self.write(offset, |commands| {
            commands.write16(self.base + offset, value)
        });
    }
}
