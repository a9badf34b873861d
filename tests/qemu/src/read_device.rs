//! QEMU's `edu`: a PCI device that copies between an address and a buffer of its own. It judges
//! reads, which `iommu-testdev` does not make.

use std::rc::Rc;

use ringfence_types::{Iova, RequesterId};

use crate::board::Board;
use crate::qtest::{Commands, Qtest};
use crate::test_device::enable;

/// Vendor 1234, device 11e8.
const ID: u32 = 0x11e8_1234;
const SOURCE: u64 = 0x80;
const TARGET: u64 = 0x88;
const COUNT: u64 = 0x90;
const COMMAND: u64 = 0x98;
/// COMMAND: begins a copy into the buffer.
const READ: u64 = 0b01;
/// COMMAND: begins a copy from the buffer.
const WRITE: u64 = 0b11;
/// Address of the buffer in the device's own addresses.
const BUFFER: u64 = 0x4_0000;
/// Time of a copy in nanoseconds.
const COPY: u64 = 100_000_000;

/// A reading device at one requester id.
#[derive(Debug, Clone)]
pub struct ReadDevice {
    qtest: Rc<Qtest>,
    requester: RequesterId,
    bar: u64,
}

impl ReadDevice {
    pub(crate) fn enable(
        qtest: Rc<Qtest>,
        board: Board,
        requester: RequesterId,
        bar: u64,
    ) -> anyhow::Result<Self> {
        enable(&qtest, board, requester, bar, ID)?;
        Ok(Self {
            qtest,
            requester,
            bar,
        })
    }

    /// Returns the requester id of the device.
    pub const fn requester(&self) -> RequesterId {
        self.requester
    }

    /// Reads `bytes` bytes at `iova` into the device's buffer, in one round trip. The device does
    /// not tell whether the read succeeded: [`write`](Self::write) shows the bytes.
    ///
    /// # Errors
    /// QEMU fails.
    pub fn read(&self, iova: Iova, bytes: u64) -> anyhow::Result<()> {
        self.copy(READ, iova.get(), BUFFER, bytes)
    }

    /// Writes the first `bytes` bytes of the buffer to `iova`, in one round trip.
    ///
    /// # Errors
    /// QEMU fails.
    pub fn write(&self, iova: Iova, bytes: u64) -> anyhow::Result<()> {
        self.copy(WRITE, BUFFER, iova.get(), bytes)
    }

    fn copy(&self, command: u64, source: u64, target: u64, bytes: u64) -> anyhow::Result<()> {
        let mut commands = Commands::default();
        self.add_copy(&mut commands, command, source, target, bytes);
        self.qtest.send(&commands).map(drop)
    }

    /// Adds a [`read`](Self::read).
    pub(crate) fn add_read(&self, commands: &mut Commands, iova: Iova, bytes: u64) {
        self.add_copy(commands, READ, iova.get(), BUFFER, bytes);
    }

    /// Adds a [`write`](Self::write).
    pub(crate) fn add_write(&self, commands: &mut Commands, iova: Iova, bytes: u64) {
        self.add_copy(commands, WRITE, BUFFER, iova.get(), bytes);
    }

    fn add_copy(
        &self,
        commands: &mut Commands,
        command: u64,
        source: u64,
        target: u64,
        bytes: u64,
    ) {
        commands.write64(self.bar + SOURCE, source);
        commands.write64(self.bar + TARGET, target);
        commands.write64(self.bar + COUNT, bytes);
        commands.write64(self.bar + COMMAND, command);
        commands.step_clock(COPY);
    }
}
