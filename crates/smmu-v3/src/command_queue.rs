//! The command queue (IHI 0070, sections 3.5 and 4.1): indices, completion and errors.

use ringfence_pgtable::{TableError, TableMemory};
use ringfence_types::{PhysAddr, PhysMemory, Registers};

use crate::registers::{ABSENT, CMDQ_BASE, CMDQ_CONS, CMDQ_PROD, CONS_ERR, CONS_ERR_SHIFT};

/// Bytes of a command.
pub(crate) const COMMAND_BYTES: u64 = 16;
/// ADDR of `CMDQ_BASE` and `EVENTQ_BASE`.
pub(crate) const QUEUE_ADDRESS: u64 = 0x00ff_ffff_ffff_ffe0;

/// The reason why the unit stopped consuming commands (`CMDQ_CONS.ERR`, section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CommandError {
    /// `CERROR_ILL`: the unit does not know the command or a value in it.
    Illegal,
    /// `CERROR_ABT`: the unit could not read the command.
    Abort,
    /// `CERROR_ATC_INV_SYNC`: a device did not invalidate its translation cache in time.
    AtcInvalidation,
    /// Another value; 0 is `CERROR_NONE`.
    Unknown(u8),
}

impl CommandError {
    const fn decode(consumer: u32) -> Self {
        match consumer >> CONS_ERR_SHIFT & CONS_ERR {
            1 => Self::Illegal,
            2 => Self::Abort,
            3 => Self::AtcInvalidation,
            other => Self::Unknown(other as u8),
        }
    }
}

/// The queue, in one frame.
///
/// Positions count commands since the start and never wrap: a position's low bits are the index in
/// the registers, with the wrap bit above the entries' bits. A ticket is the position behind its
/// `CMD_SYNC`.
#[derive(Debug)]
pub(crate) struct CommandQueue {
    frame: PhysAddr,
    entries: u32,
    /// Position of the next command.
    produced: u64,
    /// Position of the first command that the unit may still read.
    consumed: u64,
    /// Commands before this position are complete.
    completed: u64,
    /// End of the invalidation of all caches that replaces the commands that a restart lost.
    recovery: u64,
    /// Polls since the last progress.
    pub(crate) stalled: u32,
    /// The unit has stopped at an error, or its index is not valid. Set until
    /// [`restart`](Self::restart).
    pub(crate) failed: bool,
}

impl CommandQueue {
    pub(crate) const fn new(frame: PhysAddr, entries: u32) -> Self {
        Self {
            frame,
            entries,
            produced: 0,
            consumed: 0,
            completed: 0,
            recovery: 0,
            stalled: 0,
            failed: false,
        }
    }

    pub(crate) const fn frame(&self) -> PhysAddr {
        self.frame
    }

    /// Returns the number of commands that fit.
    pub(crate) const fn capacity(&self) -> u32 {
        self.entries
    }

    pub(crate) const fn produced(&self) -> u64 {
        self.produced
    }

    /// Writes the base and equal indices. The queue must be disabled.
    pub(crate) fn write_base<R: Registers>(&mut self, unit: &R) {
        let log2 = u64::from(self.entries.trailing_zeros());
        unit.write64(CMDQ_BASE, self.frame.get() & QUEUE_ADDRESS | log2);
        self.restart(unit);
    }

    /// Discards the commands that were not consumed. No command completes before the position that
    /// [`recover_at`](Self::recover_at) then sets. The queue must be disabled.
    pub(crate) fn restart<R: Registers>(&mut self, unit: &R) {
        let index = self.index(self.produced);
        unit.write32(CMDQ_PROD, index);
        unit.write32(CMDQ_CONS, index);
        self.consumed = self.produced;
        self.recovery = u64::MAX;
        self.stalled = 0;
        self.failed = false;
    }

    /// Makes `position` the end of the invalidation that replaces lost commands.
    pub(crate) const fn recover_at(&mut self, position: u64) {
        self.recovery = position;
    }

    /// Returns the index with the wrap bit.
    const fn index(&self, position: u64) -> u32 {
        position as u32 & self.index_mask()
    }

    const fn index_mask(&self) -> u32 {
        self.entries.wrapping_mul(2).wrapping_sub(1)
    }

    /// Writes a command behind the last one. The unit sees it after
    /// [`write_prod`](Self::write_prod).
    pub(crate) fn push<M: PhysMemory>(
        &mut self,
        memory: &TableMemory<'_, M>,
        command: [u64; 2],
    ) -> Result<(), TableError> {
        let slot = self.produced & u64::from(self.entries.wrapping_sub(1));
        let at = self.frame.wrapping_add(slot.wrapping_mul(COMMAND_BYTES));
        memory.store(at, &command)?;
        self.produced = self.produced.wrapping_add(1);
        Ok(())
    }

    /// Removes the commands from `position` on, which the unit has not been told of.
    pub(crate) const fn withdraw(&mut self, position: u64) {
        self.produced = position;
    }

    /// Tells the unit the index behind the last command.
    pub(crate) fn write_prod<R: Registers>(&self, unit: &R) {
        unit.write32(CMDQ_PROD, self.index(self.produced));
    }

    /// Returns the free entries, as of the last read of `CMDQ_CONS`.
    pub(crate) const fn free(&self) -> u64 {
        let used = self.produced.wrapping_sub(self.consumed);
        (self.entries as u64).saturating_sub(used)
    }

    /// Reads the unit's index. Sets `failed` if it lies outside the commands that the unit may
    /// read.
    pub(crate) fn read_consumed<R: Registers>(&mut self, unit: &R) {
        let raw = unit.read32(CMDQ_CONS);
        let behind = self.index(self.produced).wrapping_sub(raw) & self.index_mask();
        let outstanding = self.produced.wrapping_sub(self.consumed);
        if raw == ABSENT || u64::from(behind) > outstanding {
            self.failed = true;
            return;
        }
        let consumed = self.produced.wrapping_sub(u64::from(behind));
        if consumed != self.consumed {
            self.stalled = 0;
        }
        self.consumed = consumed;
        if consumed >= self.recovery {
            self.completed = consumed;
        }
    }

    /// Returns true if the commands before `position` are complete, as of the last read.
    pub(crate) const fn is_complete(&self, position: u64) -> bool {
        position <= self.completed
    }

    /// Returns true if `position` commands were pushed since the start.
    pub(crate) const fn is_submitted(&self, position: u64) -> bool {
        position <= self.produced
    }

    /// Returns the error at which the unit has stopped.
    pub(crate) fn error<R: Registers>(&self, unit: &R) -> CommandError {
        CommandError::decode(unit.read32(CMDQ_CONS))
    }
}
