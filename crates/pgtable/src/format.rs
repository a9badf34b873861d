//! The [`Format`] trait: bit layout of addresses and entries. All other code is generic over it.

use core::fmt;

use ringfence_types::{Iova, PageSize, Permissions, PhysAddr};

/// Software field: number of present entries in the table that a table entry points to.
const LIVE_SHIFT: u32 = 52;
const LIVE: u64 = 0x3ff << LIVE_SHIFT;

/// A level of a page table. Level 1 holds the entries of the smallest pages; the root has the
/// highest level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Level(u8);

impl Level {
    /// The level of the leaves of one granule.
    pub const LEAF: Self = Self(1);

    pub(crate) const TWO: Self = Self(2);
    pub(crate) const THREE: Self = Self(3);
    pub(crate) const FOUR: Self = Self(4);
    pub(crate) const FIVE: Self = Self(5);

    /// The highest level of any format in this crate: that of AMD-Vi.
    pub const MAX: Self = Self(6);

    /// Creates level `raw`; `None` outside 1 to [`Level::MAX`].
    #[inline]
    pub const fn new(raw: u8) -> Option<Self> {
        if raw == 0 || raw > Self::MAX.0 {
            return None;
        }
        Some(Self(raw))
    }

    /// Returns the level, 1 to 6.
    #[inline]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns the size of a page that an entry at this level maps if each level selects 9 bits;
    /// `None` above 1 GiB.
    #[inline]
    pub(crate) const fn page_size(self) -> Option<PageSize> {
        match self {
            Self::LEAF => Some(PageSize::Size4K),
            Self::TWO => Some(PageSize::Size2M),
            Self::THREE => Some(PageSize::Size1G),
            _ => None,
        }
    }

    /// Returns the next lower level; `None` at level 1.
    #[inline]
    pub const fn below(self) -> Option<Self> {
        if self.0 <= 1 {
            return None;
        }
        Some(Self(self.0 - 1))
    }

    /// Returns the next higher level; `None` at [`Level::MAX`].
    #[inline]
    pub const fn above(self) -> Option<Self> {
        Self::new(self.0 + 1)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "level {}", self.0)
    }
}

/// A decoded entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// The entry is not present.
    Absent,
    /// The entry points to a table of a lower level.
    Table {
        /// Address of the table.
        at: PhysAddr,
        /// Level of the table: the next lower one, unless the entry names a level and skips some.
        next: Level,
        /// Permissions of every path through this entry.
        permissions: Permissions,
    },
    /// The entry maps a page.
    Leaf {
        /// Address of the first byte of the page.
        base: PhysAddr,
        /// Size of the page. The leaf of several entries has the size of all of them.
        size: PageSize,
        /// Permissions that the entry grants.
        permissions: Permissions,
    },
    /// The entry is present and has a reserved bit set; the hardware raises a fault.
    Reserved,
}

/// Bit layout of one kind of page table.
///
/// # Contract
/// - Indices and shifts of consecutive levels neither overlap nor leave a gap.
/// - A zero word decodes to [`Entry::Absent`] at every level.
/// - [`decode`](Self::decode) inverts [`leaf`](Self::leaf), [`leaf_of_run`](Self::leaf_of_run) and
///   [`table`](Self::table), except that a format without write-only pages decodes a write-only
///   leaf as readable and writable.
/// - `decode` accepts any word: hardware and hostile software may write the tables. The level of a
///   table is always below that of the entry.
/// - An entry is absent if certain bits are zero. The bitwise OR of several entries is therefore
///   absent if and only if all of them are.
pub trait Format: Copy + fmt::Debug {
    /// Size of an entry in bytes: 8, or 4 if two entries share a word. [`Table`](crate::Table)
    /// writes only formats with entries of 8 bytes.
    const ENTRY_BYTES: u64 = 8;

    /// Size of a table page, and of a leaf at [`Level::LEAF`].
    const GRANULE: PageSize = PageSize::Size4K;

    /// True if the hardware ignores ten bits of a table entry that can hold
    /// [`live`](Self::live). Otherwise [`ReclaimingTable`](crate::ReclaimingTable) reads a table
    /// page to see that it is empty.
    const COUNTS: bool = true;

    /// True if the words of leaves at consecutive addresses, and of the entries of one leaf, differ
    /// by a constant. False for entries in big-endian order.
    const CONSTANT_STEP: bool = true;

    /// Software bit of a table entry. When set, the entry and the table page it points to have been
    /// written back to memory. Zero if the format has no table entries.
    const WRITTEN_BACK: u64;

    /// Returns the level of the root.
    fn root_level(&self) -> Level;

    /// Returns the number of IOVA bits that the table translates.
    fn width(&self) -> u32;

    /// Returns true if the table translates `iova`. The default: all bits above
    /// [`width`](Self::width) are zero.
    #[inline]
    fn translates(&self, iova: Iova) -> bool {
        iova.get() >> self.width() == 0
    }

    /// Returns the number of physical address bits that an entry holds.
    fn physical_bits(&self) -> u32;

    /// Returns the lowest address bit that selects an entry at `level`. An entry covers 2^shift
    /// bytes. The default: each level selects 9 bits.
    #[inline]
    fn shift(&self, level: Level) -> u32 {
        3 + 9 * u32::from(level.get())
    }

    /// Returns the number of entries in a table at `level`, a power of two. Every table below the
    /// root fills a page of [`GRANULE`](Self::GRANULE).
    #[inline]
    fn entries(&self, level: Level) -> usize {
        let _ = level;
        (Self::GRANULE.bytes() / 8) as usize
    }

    /// Returns the alignment of the root in bytes: a granule, or the size of a larger root.
    #[inline]
    fn root_alignment(&self) -> u64 {
        Self::GRANULE.bytes()
    }

    /// Returns the page size of a leaf of one entry at `level`; `None` if the format allows no leaf
    /// there.
    fn leaf_size(&self, level: Level) -> Option<PageSize>;

    /// Returns true if a leaf may consist of several consecutive entries of a table.
    #[inline]
    fn has_runs(&self) -> bool {
        false
    }

    /// Returns the binary logarithm of the number of entries of the largest leaf at `level` that
    /// has at most 2^`most` entries. The leaf is aligned to its size. Zero unless
    /// [`has_runs`](Self::has_runs).
    #[inline]
    fn leaf_run(&self, level: Level, most: u32) -> u32 {
        let _ = (level, most);
        0
    }

    /// Returns false if the present entry `raw` at [`Level::LEAF`] is not part of a leaf of several
    /// entries. Decoding tells the rest.
    #[inline]
    fn may_be_run(&self, raw: u64) -> bool {
        let _ = raw;
        self.has_runs()
    }

    /// Decodes an entry of a table at `level`.
    fn decode(&self, level: Level, raw: u64) -> Entry;

    /// Returns true if the hardware treats the entry as not present. Equivalent to `decode(..) ==
    /// Entry::Absent` at every level.
    fn is_absent(&self, raw: u64) -> bool;

    /// Returns the next lower table that an entry of `level` points to; `None` if the entry does
    /// not have the form that [`table`](Self::table) writes.
    ///
    /// The CPU uses this for its own descent. It meets other entries only if something else wrote
    /// to its tables.
    fn descend(&self, level: Level, raw: u64) -> Option<PhysAddr>;

    /// Encodes a leaf of one entry. `base` must be aligned to `leaf_size(level)` and fit in
    /// `physical_bits`.
    fn leaf(&self, level: Level, base: PhysAddr, permissions: Permissions) -> u64;

    /// Encodes one entry of a leaf of 2^`run` entries, a value of [`leaf_run`](Self::leaf_run).
    /// `at` is the address that this entry maps, not the base of the leaf.
    #[inline]
    fn leaf_of_run(&self, level: Level, at: PhysAddr, run: u32, permissions: Permissions) -> u64 {
        let _ = run;
        self.leaf(level, at, permissions)
    }

    /// Encodes an entry of `level` that points to the table of the next lower level at `at`. It
    /// grants all permissions; the leaf restricts them.
    fn table(&self, level: Level, at: PhysAddr) -> u64;

    /// Returns the number of present entries (0 to 512) in the table below, as stored in the
    /// software bits of the table entry `raw`. The default: bits 52 to 61.
    #[inline]
    fn live(&self, raw: u64) -> u16 {
        ((raw & LIVE) >> LIVE_SHIFT) as u16
    }

    /// Returns the table entry `raw` with its count of present entries set to `live`.
    #[inline]
    fn with_live(&self, raw: u64, live: u16) -> u64 {
        (raw & !LIVE) | ((u64::from(live) << LIVE_SHIFT) & LIVE)
    }

    /// Returns the offset in a table of the word that holds entry `index`.
    #[inline]
    fn word_offset(&self, index: usize) -> u64 {
        (index as u64).wrapping_mul(Self::ENTRY_BYTES) & !7
    }

    /// Returns entry `index` from the `word` that holds it.
    #[inline]
    fn entry_in(&self, word: u64, index: usize) -> u64 {
        match Self::ENTRY_BYTES {
            4 => word >> (index % 2 * 32) & 0xffff_ffff,
            _ => word,
        }
    }

    /// Returns the index of the entry for `iova` in a table at `level`.
    #[inline]
    fn index(&self, level: Level, iova: Iova) -> usize {
        let mask = (self.entries(level) as u64).wrapping_sub(1);
        (iova.get().wrapping_shr(self.shift(level)) & mask) as usize
    }
}
