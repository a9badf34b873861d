//! rDEVICE, rRINGs and tables of one device in one piece of memory (rIOMMU Fig. 9a to 9c).
//!
//! ```text
//! base        rDEVICE            16 bytes, on its own page as the context entry requires
//! base + 16   rRING[0..R]        16 bytes each
//! ...         tables, in order   16 bytes per slot, each aligned to a cache line
//! ```

use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use ringfence_pgtable::{
    Coherency, RING_ENTRY_BYTES, RingDevice, RingTable, RingWords, ring_words,
};
use ringfence_types::{PageSize, PhysAddr, PhysMemory, PhysRange, RingId};

use super::dirty_lines::LINE;
use super::slots::SlotChoice;
use super::table::Ring;
use crate::error::RingError;

/// The parameters that all rings of a device share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSetup {
    /// The slot that a map takes.
    pub choice: SlotChoice,
    /// The coherency of the unit's page-table walks.
    pub coherency: Coherency,
}

/// The layout of a device's tables in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingTables {
    rings: Vec<RingTable>,
    memory: PhysRange,
}

impl RingTables {
    /// Lays out tables for rings of `slots` slots each, from `base` up.
    ///
    /// # Errors
    /// Returns [`RingError`] if a ring has no slots or too many, or if there are no rings or too
    /// many. Also if `base` is misaligned or too high.
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
            // Align to a line: four entries share a line, two tables never do.
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

    /// Returns the memory of the tables.
    pub fn memory(&self) -> PhysRange {
        self.memory
    }
}

/// Writes the device's rDEVICE and rRINGs and returns its rings, all free.
///
/// The memory of `tables` must be zero. The hardware owns it from this call until no context entry
/// points to it and the device's caches are flushed. The context entry must point to its first
/// byte.
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
    // The rRINGs must be in memory before the rDEVICE points to them.
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
