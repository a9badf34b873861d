//! Radix tables of frames: the device directory and the process directories (specification 1.0,
//! sections "Device-Directory-Table" and "Process-Directory-Table").

use ringfence_pgtable::TableMemory;
use ringfence_types::{FrameSource, PageSize, PhysAddr, PhysMemory};

use crate::error::UnitError;
use crate::registers::{PPN, PPN_FROM_ADDRESS};

/// V of a non-leaf entry.
const V: u64 = 1;
const FRAME_WORDS: u64 = 512;
/// Index bits of a level above the leaves. The root of a directory with fewer uses a part of its
/// frame.
const LEVEL_BITS: u32 = 9;

/// Geometry of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Levels, 1 to 3.
    pub(crate) levels: u32,
    /// Bits of an id.
    pub(crate) bits: u32,
    /// Index bits of a leaf table.
    pub(crate) leaf_bits: u32,
}

impl Shape {
    /// Returns the bytes of a leaf entry: leaf tables fill a frame.
    const fn entry_bytes(&self) -> u64 {
        PageSize::Size4K.bytes() >> self.leaf_bits
    }

    /// Returns true if `id` has at most the bits of the directory.
    pub(crate) const fn reaches(&self, id: u32) -> bool {
        id >> self.bits == 0
    }

    const fn index(&self, level: u32, id: u32) -> u64 {
        let shift = self
            .leaf_bits
            .wrapping_add(LEVEL_BITS.wrapping_mul(level.wrapping_sub(1)));
        (id >> shift) as u64 & ((1 << LEVEL_BITS) - 1)
    }

    const fn leaf_index(&self, id: u32) -> u64 {
        id as u64 & ((1 << self.leaf_bits) - 1)
    }
}

/// A directory. Tables below the root are allocated when an id needs them.
#[derive(Debug)]
pub(crate) struct Directory {
    root: PhysAddr,
    shape: Shape,
}

impl Directory {
    /// Allocates an empty directory.
    pub(crate) fn new<M: PhysMemory, S: FrameSource + ?Sized>(
        shape: Shape,
        tables: &TableMemory<'_, M>,
        frames: &S,
    ) -> Result<Self, UnitError> {
        Ok(Self {
            root: tables.frame(frames)?,
            shape,
        })
    }

    pub(crate) const fn root(&self) -> PhysAddr {
        self.root
    }

    pub(crate) const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Sets the geometry of an empty directory.
    pub(crate) const fn set_shape(&mut self, shape: Shape) {
        self.shape = shape;
    }

    /// Returns the address of the leaf entry of `id`, which the directory must reach. Allocates
    /// missing tables. After an error, tables that were allocated stay linked and empty.
    pub(crate) fn entry<M: PhysMemory, S: FrameSource + ?Sized>(
        &self,
        tables: &TableMemory<'_, M>,
        frames: &S,
        id: u32,
    ) -> Result<PhysAddr, UnitError> {
        let mut table = self.root;
        for level in (1..self.shape.levels).rev() {
            let at = table.wrapping_add(self.shape.index(level, id).wrapping_mul(8));
            let raw = tables.load(at)?;
            if raw & V != 0 {
                table = next(raw);
                continue;
            }
            table = tables.frame(frames)?;
            // An entry that becomes valid owes no invalidation: units cache valid entries only.
            tables.store(at, &[table.get() >> PPN_FROM_ADDRESS & PPN | V])?;
        }
        let offset = self
            .shape
            .leaf_index(id)
            .wrapping_mul(self.shape.entry_bytes());
        Ok(table.wrapping_add(offset))
    }

    /// Frees all tables. The unit must not read them any more.
    pub(crate) fn destroy<M: PhysMemory, S: FrameSource + ?Sized>(
        &self,
        tables: &TableMemory<'_, M>,
        frames: &S,
    ) {
        self.free_below(tables, frames, self.shape.levels, self.root);
    }

    /// Recursion depth is bounded by the three levels.
    fn free_below<M: PhysMemory, S: FrameSource + ?Sized>(
        &self,
        tables: &TableMemory<'_, M>,
        frames: &S,
        levels: u32,
        table: PhysAddr,
    ) {
        let entries = if levels > 1 { FRAME_WORDS } else { 0 };
        for index in 0..entries {
            if let Ok(raw) = tables.load(table.wrapping_add(index.wrapping_mul(8)))
                && raw & V != 0
            {
                self.free_below(tables, frames, levels.wrapping_sub(1), next(raw));
            }
        }
        frames.free(table);
    }
}

const fn next(raw: u64) -> PhysAddr {
    PhysAddr::new((raw & PPN) << PPN_FROM_ADDRESS)
}
