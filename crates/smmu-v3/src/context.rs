//! Context descriptors (IHI 0070, section 5.4), one for each domain of stage 1.

use alloc::vec::Vec;

use ringfence_pgtable::TableMemory;
use ringfence_types::{DomainId, FrameSource, PhysAddr, PhysMemory};

use crate::capabilities::Capabilities;
use crate::error::UnitError;
use crate::stream_entry::cached;
use crate::stream_table::ENTRY_BYTES;
use crate::translation::PageTable;

const TG0_SHIFT: u32 = 6;
/// IR0 and OR0 write-back, SH0 inner shareable. Zero is not cacheable.
const WALK_CACHED: u64 = 0b01 << 8 | 0b01 << 10 | 0b11 << 12;
/// No table for the upper half of the addresses.
const EPD1: u64 = 1 << 30;
const V: u64 = 1 << 31;
const IPS_SHIFT: u32 = 32;
const AA64: u64 = 1 << 41;
/// Faults are recorded.
const R: u64 = 1 << 45;
/// Faulting transactions are aborted.
const A: u64 = 1 << 46;
/// The CPUs do not use the ASID.
const ASET: u64 = 1 << 47;
const ASID_SHIFT: u32 = 48;
/// Field TTB0: address of the first table.
const TABLE: u64 = 0x00ff_ffff_ffff_fff0;
/// Attributes 0: normal memory, write-back cacheable. The leaves name no other.
const MAIR: u64 = 0xff;

/// Returns the words of a valid descriptor. S is zero: faulting transactions do not stall.
pub(crate) fn words(unit: &Capabilities, domain: DomainId, table: &PageTable) -> [u64; 8] {
    let control = table.size_field()
        | table.granule_field() << TG0_SHIFT
        | cached(unit, WALK_CACHED)
        | EPD1
        | V
        | unit.output_size() << IPS_SHIFT
        | AA64
        | R
        | A
        | ASET
        | u64::from(domain.get()) << ASID_SHIFT;
    [control, table.root.get() & TABLE, 0, MAIR, 0, 0, 0, 0]
}

/// Memory of context descriptors.
#[derive(Debug, Default)]
pub(crate) struct Contexts {
    frames: Vec<PhysAddr>,
    free: Vec<PhysAddr>,
}

impl Contexts {
    /// Takes the memory of a descriptor.
    pub(crate) fn take<M: PhysMemory, S: FrameSource + ?Sized>(
        &mut self,
        memory: &TableMemory<'_, M>,
        frames: &S,
    ) -> Result<PhysAddr, UnitError> {
        if let Some(at) = self.free.pop() {
            return Ok(at);
        }
        let frame = memory.frame(frames)?;
        self.frames.push(frame);
        let count = frames.frame_size().bytes() / ENTRY_BYTES;
        let address = |index: u64| frame.wrapping_add(index.wrapping_mul(ENTRY_BYTES));
        self.free.extend((1..count).rev().map(address));
        Ok(frame)
    }

    /// Returns the memory of a descriptor that no entry names and no cache holds.
    pub(crate) fn give(&mut self, at: PhysAddr) {
        self.free.push(at);
    }

    /// Frees all frames. The unit must not read them any more.
    pub(crate) fn destroy<S: FrameSource + ?Sized>(&self, frames: &S) {
        for frame in &self.frames {
            frames.free(*frame);
        }
    }
}
