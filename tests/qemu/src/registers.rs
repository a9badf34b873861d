//! The registers of a unit in QEMU.

use std::rc::Rc;

use ringfence_types::Registers;

use crate::qtest::{Commands, Qtest};

/// The registers of the unit at `base`. A failure of the connection is reported by the next access
/// of a test device; registers then read as all ones.
#[derive(Debug, Clone)]
pub struct QtestRegisters {
    qtest: Rc<Qtest>,
    base: u64,
}

impl QtestRegisters {
    /// Accesses the registers at `base` through `qtest`.
    pub const fn new(qtest: Rc<Qtest>, base: u64) -> Self {
        Self { qtest, base }
    }

    fn read(&self, add: impl FnOnce(&mut Commands) -> usize) -> u64 {
        let mut commands = Commands::default();
        let index = add(&mut commands);
        let replies = self.qtest.send(&commands);
        replies
            .and_then(|replies| replies.number(index))
            .unwrap_or(u64::MAX)
    }

    fn write(&self, add: impl FnOnce(&mut Commands) -> usize) {
        let mut commands = Commands::default();
        add(&mut commands);
        // The connection remembers a failure.
        let _ = self.qtest.send(&commands);
    }
}

impl Registers for QtestRegisters {
    fn read32(&self, offset: u64) -> u32 {
        self.read(|commands| commands.read32(self.base + offset)) as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        self.read(|commands| commands.read64(self.base + offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(|commands| commands.write32(self.base + offset, value));
    }

    fn write64(&self, offset: u64, value: u64) {
        self.write(|commands| commands.write64(self.base + offset, value));
    }
}
