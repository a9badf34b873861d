//! QEMU's `iommu-testdev`: a PCI device that writes to an address when told to.

use std::rc::Rc;

use anyhow::{bail, ensure};
use ringfence_types::{Iova, RequesterId};

use crate::board::Board;
use crate::qtest::{Commands, Qtest, Replies};

/// Vendor 1b36, device 0005.
const ID: u32 = 0x0005_1b36;
const CONFIG_ID: u8 = 0x00;
const CONFIG_COMMAND: u8 = 0x04;
const CONFIG_BAR0: u8 = 0x10;
/// Memory space and bus master.
const COMMAND: u32 = 0x6;

/// The registers that one access writes, from GVA_LO to GPA_HI: GVA_LO, GVA_HI, LEN, RESULT, DBELL,
/// ATTRS, GPA_LO, GPA_HI.
const FIRST_WRITTEN: u64 = 0x04;
/// The registers that one access reads, from TRIGGERING to RESULT.
const READ: usize = 5;
/// DBELL: arms the access.
const ARM: u32 = 1;
/// ATTRS: not secure, in a valid address space.
const NON_SECURE: u32 = 0b1010;

const SUCCESS: u32 = 0;
const STOPPED: u32 = 0xdead_0002;
const READ_BACK_FAILED: u32 = 0xdead_0003;
const READ_BACK_DIFFERS: u32 = 0xdead_0004;

/// The word that the device writes, lowest byte first, again and again.
const PATTERN: u32 = 0x1234_5678;

/// QEMU's answer to an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte was translated. The caller looks in RAM where they landed.
    Landed,
    /// At least one byte was not translated.
    Stopped,
}

/// A test device at one requester id.
#[derive(Debug, Clone)]
pub struct TestDevice {
    qtest: Rc<Qtest>,
    requester: RequesterId,
    bar: u64,
}

impl TestDevice {
    /// Enables the device `requester`, with its registers at `bar`.
    ///
    /// # Errors
    /// The machine has no such device.
    pub(crate) fn enable(
        qtest: Rc<Qtest>,
        board: Board,
        requester: RequesterId,
        bar: u64,
    ) -> anyhow::Result<Self> {
        let mut commands = Commands::default();
        let id = board.read_config(&mut commands, requester, CONFIG_ID);
        board.write_config(&mut commands, requester, CONFIG_BAR0, u32::try_from(bar)?);
        board.write_config(&mut commands, requester, CONFIG_COMMAND, COMMAND);
        let found = qtest.send(&commands)?.number(id)? as u32;
        ensure!(found == ID, "{requester} is {found:08x}, not a test device");
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

    /// Returns the byte that a write stores at `offset` from its first byte.
    pub const fn pattern(offset: u64) -> u8 {
        (PATTERN >> (offset % 4 * 8)) as u8
    }

    /// Writes `bytes` bytes at `iova`, in one round trip.
    ///
    /// # Errors
    /// QEMU fails, or the device reports neither success nor a stopped access.
    pub fn write(&self, iova: Iova, bytes: u32) -> anyhow::Result<Verdict> {
        let mut commands = Commands::default();
        let index = self.add_write(&mut commands, iova, bytes);
        self.verdict(&self.qtest.send(&commands)?, index)
    }

    /// Adds a write of `bytes` bytes at `iova`.
    pub(crate) fn add_write(&self, commands: &mut Commands, iova: Iova, bytes: u32) -> usize {
        let (low, high) = (iova.get() as u32, (iova.get() >> 32) as u32);
        commands.write_many(
            self.bar + FIRST_WRITTEN,
            &[low, high, bytes, 0, ARM, NON_SECURE, 0, 0],
        );
        commands.read_many(self.bar, READ)
    }

    /// Returns QEMU's answer to the write that [`add_write`](Self::add_write) added.
    ///
    /// # Errors
    /// The device reports neither success nor a stopped access.
    pub(crate) fn verdict(&self, replies: &Replies, index: usize) -> anyhow::Result<Verdict> {
        match replies.many(index)?.last() {
            // The device reads back from another address than the write's, which may differ.
            Some(&(SUCCESS | READ_BACK_FAILED | READ_BACK_DIFFERS)) => Ok(Verdict::Landed),
            Some(&STOPPED) => Ok(Verdict::Stopped),
            other => bail!("the test device {} reports {other:x?}", self.requester),
        }
    }
}

/// Enables the device `requester`, which must be `id`, with its first BAR at `bar`.
pub(crate) fn enable(
    qtest: &Qtest,
    board: Board,
    requester: RequesterId,
    bar: u64,
    id: u32,
) -> anyhow::Result<()> {
    let mut commands = Commands::default();
    let found = board.read_config(&mut commands, requester, CONFIG_ID);
    board.write_config(&mut commands, requester, CONFIG_BAR0, u32::try_from(bar)?);
    board.write_config(&mut commands, requester, CONFIG_COMMAND, COMMAND);
    let found = qtest.send(&commands)?.number(found)? as u32;
    ensure!(found == id, "{requester} is {found:08x}, not {id:08x}");
    Ok(())
}
