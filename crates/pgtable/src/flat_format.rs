//! Flat formats: one table of 4 KiB pages, indexed by the page number.

use core::fmt;

use ringfence_types::{PageSize, Permissions, PhysAddr};

use crate::{Entry, Format, Level};

/// Bit layout of the entries of a flat table. Every flat format is a [`Format`] of one level.
pub trait FlatFormat: Copy + fmt::Debug {
    /// Size of an entry in bytes: 8, or 4 if two entries share a word.
    const BYTES: u64;

    /// Number of physical address bits that an entry holds.
    const PHYSICAL_BITS: u32;

    /// Returns the number of IOVA bits that the table translates.
    fn address_bits(&self) -> u32;

    /// Encodes a valid entry as in memory. `base` must be aligned to 4 KiB.
    fn encode(base: PhysAddr, permissions: Permissions) -> u64;

    /// Decodes an entry as in memory: never as [`Entry::Table`].
    fn decode_entry(raw: u64) -> Entry;

    /// Returns true if the entry is not valid.
    fn is_empty(raw: u64) -> bool;
}

/// A flat format with entries of 32 bits, two in each word of this crate, and without access
/// control: a valid entry allows reads and writes.
pub trait HalfWord: FlatFormat {}

impl<F: FlatFormat> Format for F {
    const CONSTANT_STEP: bool = false;
    const ENTRY_BYTES: u64 = F::BYTES;
    const WRITTEN_BACK: u64 = 0;

    #[inline]
    fn root_level(&self) -> Level {
        Level::LEAF
    }

    #[inline]
    fn width(&self) -> u32 {
        self.address_bits()
    }

    #[inline]
    fn physical_bits(&self) -> u32 {
        F::PHYSICAL_BITS
    }

    #[inline]
    fn shift(&self, _level: Level) -> u32 {
        12
    }

    #[inline]
    fn entries(&self, _level: Level) -> usize {
        1 << (self.address_bits() - 12)
    }

    #[inline]
    fn leaf_size(&self, _level: Level) -> Option<PageSize> {
        Some(PageSize::Size4K)
    }

    #[inline]
    fn decode(&self, _level: Level, raw: u64) -> Entry {
        F::decode_entry(raw)
    }

    #[inline]
    fn is_absent(&self, raw: u64) -> bool {
        F::is_empty(raw)
    }

    #[inline]
    fn leaf(&self, _level: Level, base: PhysAddr, permissions: Permissions) -> u64 {
        F::encode(base, permissions)
    }

    #[inline]
    fn descend(&self, _level: Level, _raw: u64) -> Option<PhysAddr> {
        None
    }

    // A flat table has no table entries. Nothing calls this; zero is an absent entry.
    #[inline]
    fn table(&self, _level: Level, _at: PhysAddr) -> u64 {
        0
    }

    #[inline]
    fn live(&self, _raw: u64) -> u16 {
        0
    }

    #[inline]
    fn with_live(&self, raw: u64, _live: u16) -> u64 {
        raw
    }
}
