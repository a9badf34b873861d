//! The stream table (IHI 0070, section 3.3.1 "Stream table lookup").

use ringfence_pgtable::{TableError, TableMemory};
use ringfence_types::{FrameSource, PageSize, PhysAddr, PhysMemory, PhysRange};

use crate::error::UnitError;
use crate::registers::{FMT_TWO_LEVELS, SPLIT_SHIFT};

/// Bytes of a stream table entry and of a context descriptor.
pub(crate) const ENTRY_BYTES: u64 = 64;
/// Field L2Ptr of a level-1 descriptor: address of the level-2 table.
const L2_POINTER: u64 = 0x00ff_ffff_ffff_ffc0;

/// Geometry of a stream table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    bits: u32,
    /// Bits of a stream id that select an entry of the second level; `None` in a linear table.
    split: Option<u32>,
}

impl Shape {
    /// Two levels if the unit has them and the first would have more than one descriptor. A table
    /// of the second level fits a frame.
    pub(crate) const fn new(two_levels: bool, bits: u32, frame: PageSize) -> Self {
        // The values that SPLIT may have, each a table of 4, 16 or 64 KiB.
        let split = match frame.shift() {
            0..=13 => 6,
            14..=15 => 8,
            _ => 10,
        };
        Self {
            bits,
            split: if two_levels && bits > split {
                Some(split)
            } else {
                None
            },
        }
    }

    /// Returns the bytes of the first or only level.
    pub(crate) const fn top_bytes(&self) -> u64 {
        let shift = match self.split {
            Some(split) => self.bits.wrapping_sub(split).wrapping_add(3),
            None => self.bits.wrapping_add(6),
        };
        match 1_u64.checked_shl(shift) {
            Some(bytes) if bytes > ENTRY_BYTES => bytes,
            Some(_) => ENTRY_BYTES,
            None => u64::MAX,
        }
    }

    /// Returns the value of `STRTAB_BASE_CFG`.
    pub(crate) const fn configuration(&self) -> u32 {
        match self.split {
            Some(split) => FMT_TWO_LEVELS | split << SPLIT_SHIFT | self.bits,
            None => self.bits,
        }
    }

    pub(crate) const fn is_linear(&self) -> bool {
        self.split.is_none()
    }

    pub(crate) const fn reaches(&self, stream: u32) -> bool {
        match stream.checked_shr(self.bits) {
            Some(above) => above == 0,
            None => true,
        }
    }
}

/// A stream table. Tables of the second level are allocated when a stream needs them.
#[derive(Debug)]
pub(crate) struct StreamTable {
    top: PhysAddr,
    shape: Shape,
}

impl StreamTable {
    /// Makes an empty table in `range`, which the embedder lends.
    pub(crate) fn new<M: PhysMemory>(
        shape: Shape,
        range: PhysRange,
        memory: &TableMemory<'_, M>,
    ) -> Result<Self, UnitError> {
        let bytes = shape.top_bytes();
        // The base has no bits below the size.
        if range.bytes() < bytes || !range.start().is_aligned(bytes) {
            return Err(UnitError::StreamTable { bytes });
        }
        let top = range.start();
        if !memory.holds(top, bytes) {
            return Err(TableError::Memory.into());
        }
        for entry in 0..bytes / ENTRY_BYTES {
            memory.store(top.wrapping_add(entry.wrapping_mul(ENTRY_BYTES)), &[0; 8])?;
        }
        Ok(Self { top, shape })
    }

    pub(crate) const fn top(&self) -> PhysAddr {
        self.top
    }

    pub(crate) const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the address of the entry of `stream`, which the table must reach. Allocates a
    /// missing table of the second level.
    pub(crate) fn entry<M: PhysMemory, S: FrameSource + ?Sized>(
        &self,
        memory: &TableMemory<'_, M>,
        frames: &S,
        stream: u32,
    ) -> Result<PhysAddr, UnitError> {
        let stream = u64::from(stream);
        let Some(split) = self.shape.split else {
            return Ok(self.top.wrapping_add(stream.wrapping_mul(ENTRY_BYTES)));
        };
        let at = self.top.wrapping_add((stream >> split).wrapping_mul(8));
        let raw = memory.load(at)?;
        let mut table = PhysAddr::new(raw & L2_POINTER);
        if table == PhysAddr::ZERO {
            table = memory.frame(frames)?;
            // Span: 2^(Span - 1) entries. All of them are invalid.
            let span = u64::from(split).wrapping_add(1);
            memory.store(at, &[table.get() & L2_POINTER | span])?;
        }
        let index = stream & ((1 << split) - 1);
        Ok(table.wrapping_add(index.wrapping_mul(ENTRY_BYTES)))
    }

    /// Frees the tables of the second level. The unit must not read them any more.
    pub(crate) fn destroy<M: PhysMemory, S: FrameSource + ?Sized>(
        &self,
        memory: &TableMemory<'_, M>,
        frames: &S,
    ) {
        let Some(split) = self.shape.split else {
            return;
        };
        let descriptors = 1_u64 << self.shape.bits.wrapping_sub(split);
        for index in 0..descriptors {
            let at = self.top.wrapping_add(index.wrapping_mul(8));
            let raw = memory.load(at).unwrap_or(0);
            if raw & L2_POINTER != 0 {
                frames.free(PhysAddr::new(raw & L2_POINTER));
            }
        }
    }
}
