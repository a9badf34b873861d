//! The in-memory queues (specification 1.0, chapter "In-memory queue interface"): switching them
//! on and off, the indices, and the records that the unit produces.

use ringfence_pgtable::{TableError, TableMemory};
use ringfence_types::{PhysAddr, PhysMemory, Registers, poll_until};

use crate::error::UnitError;
use crate::registers::{
    ABSENT, CSR_BUSY, CSR_ENABLE, CSR_INTERRUPT, CSR_MEMORY_FAULT, CSR_ON, CSR_OVERFLOW, PPN,
    PPN_FROM_ADDRESS, Register,
};

/// Registers of one queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueRegisters {
    pub(crate) base: u64,
    pub(crate) base_name: Register,
    /// The index register that software writes: the tail of commands, the head of records.
    pub(crate) index: u64,
    /// The index register that the unit writes.
    pub(crate) unit_index: u64,
    pub(crate) csr: u64,
    pub(crate) csr_name: Register,
}

/// A queue in one frame.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) registers: QueueRegisters,
    frame: PhysAddr,
    /// Entries minus one.
    mask: u32,
    entry_words: u32,
    /// Index that software writes next.
    pub(crate) index: u32,
    /// The unit's index, as of the last read of its register.
    unit_index: u32,
    interrupts: bool,
    /// The loss of records was reported, and the unit has not cleared its bits.
    is_loss_reported: bool,
}

impl Queue {
    /// Creates a queue of `entries` entries in the frame at `frame`. The unit does not know it yet.
    pub(crate) fn new(
        registers: QueueRegisters,
        frame: PhysAddr,
        entries: u32,
        entry_words: u32,
        interrupts: bool,
    ) -> Self {
        Self {
            registers,
            frame,
            mask: entries.wrapping_sub(1),
            entry_words,
            index: 0,
            unit_index: 0,
            interrupts,
            is_loss_reported: false,
        }
    }

    pub(crate) const fn frame(&self) -> PhysAddr {
        self.frame
    }

    /// Returns the entries that can be in use: one fewer than the queue has.
    pub(crate) const fn capacity(&self) -> u32 {
        self.mask
    }

    /// Writes the base and enables the queue (section "Guidelines for initialization").
    pub(crate) fn enable<R: Registers>(&mut self, unit: &R, polls: u32) -> Result<(), UnitError> {
        let log2_minus_1 = u64::from(self.mask.count_ones().saturating_sub(1));
        let base = self.frame.get() >> PPN_FROM_ADDRESS & PPN | log2_minus_1;
        unit.write64(self.registers.base, base);
        if unit.read64(self.registers.base) != base {
            let register = self.registers.base_name;
            return Err(UnitError::Rejected { register });
        }
        self.index = 0;
        self.unit_index = 0;
        unit.write32(self.registers.index, 0);
        self.write_csr(unit, self.enable_bits(), CSR_ON, polls)
    }

    /// Disables the queue. Then the unit neither reads nor writes its memory.
    pub(crate) fn disable<R: Registers>(&self, unit: &R, polls: u32) -> Result<(), UnitError> {
        switch_off(unit, &self.registers, polls)
    }

    /// Clears sticky bits (RW1C). The queue stays enabled, or disabled after a failed restart.
    pub(crate) fn clear<R: Registers>(&self, unit: &R, sticky: u32, polls: u32) {
        let enabled = unit.read32(self.registers.csr) & self.enable_bits();
        let on = if enabled & CSR_ENABLE == 0 { 0 } else { CSR_ON };
        // The next operation of the queue reports a unit that stays busy.
        let _ = self.write_csr(unit, enabled | sticky, on, polls);
    }

    const fn enable_bits(&self) -> u32 {
        CSR_ENABLE | if self.interrupts { CSR_INTERRUPT } else { 0 }
    }

    fn write_csr<R: Registers>(
        &self,
        unit: &R,
        value: u32,
        on: u32,
        polls: u32,
    ) -> Result<(), UnitError> {
        write_csr(unit, &self.registers, value, on, polls)
    }

    /// Reads the unit's index. `None` if the value is not an index of the queue.
    pub(crate) fn read_unit_index<R: Registers>(&mut self, unit: &R) -> Option<u32> {
        let raw = unit.read32(self.registers.unit_index);
        if raw > self.mask {
            return None;
        }
        self.unit_index = raw;
        Some(raw)
    }

    /// Returns the free entries of a queue that software fills, as of the last read of the head.
    pub(crate) const fn free(&self) -> u32 {
        self.unit_index.wrapping_sub(self.index).wrapping_sub(1) & self.mask
    }

    /// Returns the address of entry `index`.
    fn address(&self, index: u32) -> PhysAddr {
        let words = u64::from(index & self.mask).wrapping_mul(u64::from(self.entry_words));
        self.frame.wrapping_add(words.wrapping_mul(8))
    }

    /// Writes a command behind the last one. The unit sees it after [`ring`](Self::ring).
    pub(crate) fn push<M: PhysMemory>(
        &mut self,
        tables: &TableMemory<'_, M>,
        command: [u64; 2],
    ) -> Result<(), TableError> {
        tables.store(self.address(self.index), &command)?;
        self.index = self.index.wrapping_add(1) & self.mask;
        Ok(())
    }

    /// Tells the unit the index that software wrote last.
    pub(crate) fn ring<R: Registers>(&self, unit: &R) {
        unit.write32(self.registers.index, self.index);
    }

    /// Takes the next record of a queue that the unit fills; `None` if it is empty or absent.
    pub(crate) fn pop<R: Registers, M: PhysMemory, const WORDS: usize>(
        &mut self,
        unit: &R,
        tables: &TableMemory<'_, M>,
    ) -> Option<[u64; WORDS]> {
        if self.unit_index == self.index && self.read_unit_index(unit)? == self.index {
            return None;
        }
        let mut record = [0; WORDS];
        let mut at = self.address(self.index);
        for word in &mut record {
            *word = tables.load(at).ok()?;
            at = at.wrapping_add(8);
        }
        self.index = self.index.wrapping_add(1) & self.mask;
        // One write of the head for all records that the last read of the tail found.
        if self.index == self.unit_index {
            self.ring(unit);
        }
        Some(record)
    }

    /// Reports and clears the loss of records.
    pub(crate) fn take_loss<R: Registers>(&mut self, unit: &R, polls: u32) -> Option<Loss> {
        let sticky = self.loss_bits(unit);
        let is_new = !self.is_loss_reported;
        self.is_loss_reported = sticky != 0;
        if !self.is_loss_reported || !is_new {
            return None;
        }
        self.clear(unit, sticky, polls);
        self.is_loss_reported = self.loss_bits(unit) != 0;
        Some(match sticky & CSR_MEMORY_FAULT {
            0 => Loss::Overflow,
            _ => Loss::MemoryFault,
        })
    }

    /// Reads the bits of lost records; 0 if no unit answers.
    fn loss_bits<R: Registers>(&self, unit: &R) -> u32 {
        match unit.read32(self.registers.csr) {
            ABSENT => 0,
            csr => csr & (CSR_OVERFLOW | CSR_MEMORY_FAULT),
        }
    }
}

/// The reason why the unit discarded records of a queue. It discards all until the driver has
/// cleared the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Loss {
    /// The queue was full (`fqof`, `pqof`).
    Overflow,
    /// The unit could not write to the queue (`fqmf`, `pqmf`).
    MemoryFault,
}

/// Switches a queue off, also one that firmware left on.
pub(crate) fn switch_off<R: Registers>(
    unit: &R,
    registers: &QueueRegisters,
    polls: u32,
) -> Result<(), UnitError> {
    write_csr(unit, registers, 0, 0, polls)
}

/// Writes a control and status register when it is not busy, and waits until the queue is on or
/// off, as `on` demands.
fn write_csr<R: Registers>(
    unit: &R,
    registers: &QueueRegisters,
    value: u32,
    on: u32,
    polls: u32,
) -> Result<(), UnitError> {
    let late = UnitError::TimedOut {
        register: registers.csr_name,
    };
    let idle = || unit.read32(registers.csr) & CSR_BUSY == 0;
    poll_until(polls, late, idle)?;
    unit.write32(registers.csr, value);
    let done = || unit.read32(registers.csr) & (CSR_BUSY | CSR_ON) == on;
    poll_until(polls, late, done)
}
