//! rDEVICE, rRINGs and tables of one device in one piece of memory (rIOMMU Fig. 9a to 9c).
//!
//! ```text
//! base        rDEVICE            16 bytes, on a page of its own as the context entry asks
//! base + 16   rRING[0..R]        16 bytes each
//! ...         tables, in order   16 bytes a slot, each from a cache line on
//! ```

use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use ringfence_pgtable::{
    Coherency, RING_ENTRY_BYTES, RingDevice, RingTable, RingWords, ring_words,
};
use ringfence_types::{PageSize, PhysAddr, PhysMemory, PhysRange, RingId};

use super::dirty_lines::LINE;
use super::error::RingError;
use super::slots::SlotChoice;
use super::table::Ring;

/// What the rings of a device have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSetup {
    /// Which slot a map takes.
    pub choice: SlotChoice,
    /// Whether the unit's walks snoop.
    pub coherency: Coherency,
}

/// Where the tables of a device are to lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingTables {
    rings: Vec<RingTable>,
    memory: PhysRange,
}

impl RingTables {
    /// Tables for rings of `slots` slots each, from `base` on.
    ///
    /// # Errors
    /// [`RingError`]: a ring has no or too many slots, there are no or too many rings, or `base` does not suit.
    pub fn new(base: PhysAddr, slots: &[u32]) -> Result<Self, RingError> {
        if slots.is_empty() || slots.len() > usize::from(u16::MAX) {
            return Err(RingError::Count { rings: slots.len() });
        }
        if !base.is_aligned(PageSize::Size4K.bytes()) {
            return Err(RingError::Memory);
        }
        let mut rings = Vec::with_capacity(slots.len());
        let heads = (slots.len() as u64 + 1) * RING_ENTRY_BYTES;
        let mut at = base.checked_add(heads);
        for slots in slots {
            // From a line on: four entries share each line, and no two tables do.
            let from = at.and_then(|at| at.checked_add(LINE - 1));
            let from = from.ok_or(RingError::Memory)?.align_down(LINE);
            rings.push(RingTable::new(from, *slots)?);
            at = from.checked_add(u64::from(*slots) * RING_ENTRY_BYTES);
        }
        let bytes = at.and_then(|at| at.offset_from(&base));
        let memory = bytes.and_then(|bytes| PhysRange::new(base, bytes));
        Ok(Self {
            rings,
            memory: memory.ok_or(RingError::Memory)?,
        })
    }

    /// The memory they take.
    pub fn memory(&self) -> PhysRange {
        self.memory
    }
}

/// Writes the device's rDEVICE and rRINGs and returns its rings, all free. The memory of `tables`
/// is zero, is the hardware's from here on, and goes back to the caller when no context entry leads
/// to it and the device's caches have been flushed. The context entry is to lead to its first byte.
///
/// # Errors
/// [`RingError::Memory`] or [`RingError::NotEmpty`].
pub fn lay_out<M: PhysMemory + ?Sized>(
    mem: &M,
    tables: &RingTables,
    setup: RingSetup,
) -> Result<Vec<Ring>, RingError> {
    let memory = tables.memory;
    let words = usize::try_from(memory.bytes() / 8).map_err(|_| RingError::Memory)?;
    let words = mem
        .words(memory.start(), words)
        .map_err(|_| RingError::Memory)?;
    if words.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
        return Err(RingError::NotEmpty);
    }
    let heads = memory.start().wrapping_add(RING_ENTRY_BYTES);
    let mut rings = Vec::with_capacity(tables.rings.len());
    let mut head = heads;
    for (table, id) in tables.rings.iter().zip(0..) {
        table.store(entry(mem, head)?);
        rings.push(Ring::new(
            RingId::new(id),
            *table,
            setup.choice,
            setup.coherency,
        ));
        head = head.wrapping_add(RING_ENTRY_BYTES);
    }
    let count = u16::try_from(rings.len()).map_err(|_| RingError::Count { rings: rings.len() })?;
    // What the rDEVICE leads to is in memory before it leads there.
    publish(mem, setup.coherency, &memory);
    RingDevice::new(heads, count)?.store(entry(mem, memory.start())?);
    publish(mem, setup.coherency, &memory);
    Ok(rings)
}

fn entry<M: PhysMemory + ?Sized>(mem: &M, at: PhysAddr) -> Result<&RingWords, RingError> {
    ring_words(mem, at).map_err(|_| RingError::Memory)
}

fn publish<M: PhysMemory + ?Sized>(mem: &M, coherency: Coherency, memory: &PhysRange) {
    if coherency == Coherency::NonCoherent {
        mem.write_back(memory.start(), memory.bytes());
        mem.drain();
    }
}
