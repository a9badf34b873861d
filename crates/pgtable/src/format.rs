//! The role of a table format: where the bits of an address and of an entry are. Everything else is
//! written once over it.

use core::fmt;

use ringfence_types::{Iova, PageSize, Permissions, PhysAddr};

/// A level of a table: 1 holds the entries of 4 KiB pages, the root has the highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Level(u8);

impl Level {
    /// The level of 4 KiB leaves.
    pub const LEAF: Self = Self(1);

    /// The highest level of any format here.
    pub const MAX: Self = Self(5);

    /// Level `raw`; `None` outside 1 to [`Level::MAX`].
    #[inline]
    pub const fn new(raw: u8) -> Option<Self> {
        if raw == 0 || raw > Self::MAX.0 {
            return None;
        }
        Some(Self(raw))
    }

    /// 1 to 5.
    #[inline]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// The level below; `None` below level 1.
    #[inline]
    pub const fn below(self) -> Option<Self> {
        if self.0 <= 1 {
            return None;
        }
        Some(Self(self.0 - 1))
    }

    /// The level above; `None` above [`Level::MAX`].
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

/// What the bits of one entry say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// No translation.
    Absent,
    /// A table one level below.
    Table {
        /// Where it is.
        at: PhysAddr,
        /// What the path through this entry allows.
        permissions: Permissions,
    },
    /// A page.
    Leaf {
        /// Its first byte.
        base: PhysAddr,
        /// What the entry allows.
        permissions: Permissions,
    },
    /// Present, with a reserved bit set: the hardware refuses it.
    Reserved,
}

/// The layout of a kind of table.
///
/// # Contract
/// Indices and shifts grow with the level without gap or overlap; a word of zero decodes to
/// [`Entry::Absent`] at every level; [`decode`](Self::decode) inverts [`leaf`](Self::leaf) and
/// [`table`](Self::table). `decode` takes any word: tables are shared with hardware and may hold
/// anything. A word is absent if certain bits are zero, so that the disjunction of several is
/// absent if and only if all of them are.
pub trait Format: Copy + fmt::Debug {
    /// Software bit of a table entry that says that the entry and the page behind it have been
    /// written back to memory. Zero if the format has no table entries.
    const WRITTEN_BACK: u64;

    /// The level of the root.
    fn root_level(&self) -> Level;

    /// Bits of an I/O virtual address that the table translates.
    fn width(&self) -> u32;

    /// Bits of a physical address that an entry holds.
    fn physical_bits(&self) -> u32;

    /// The lowest address bit that selects an entry of a table of `level`: an entry covers 2^shift
    /// bytes.
    fn shift(&self, level: Level) -> u32;

    /// Entries in a table of `level`: a power of two. Below the root always
    /// [`TABLE_WORDS`](ringfence_types::TABLE_WORDS).
    fn entries(&self, level: Level) -> usize;

    /// The size of a leaf of `level`, or `None` if a leaf cannot stand there.
    fn leaf_size(&self, level: Level) -> Option<PageSize>;

    /// Reads an entry of a table of `level`.
    fn decode(&self, level: Level, raw: u64) -> Entry;

    /// Whether the hardware ignores an entry: the same as `decode(..) == Entry::Absent`, at any
    /// level.
    fn is_absent(&self, raw: u64) -> bool;

    /// Where an entry of a table above level 1 leads, if it is as [`table`](Self::table) writes it.
    /// For the processor's own descent, which meets no others unless somebody else writes its
    /// tables.
    fn descend(&self, raw: u64) -> Option<PhysAddr>;

    /// The entry of a page of `leaf_size(level)` at `base`, which is aligned to it and fits
    /// `physical_bits`.
    fn leaf(&self, level: Level, base: PhysAddr, permissions: Permissions) -> u64;

    /// The entry that leads to the table at `at`. Allows everything: permissions are the leaf's.
    fn table(&self, at: PhysAddr) -> u64;

    /// How many entries are present in the table behind a table entry, as noted in its software
    /// bits.
    fn live(&self, raw: u64) -> u16;

    /// The same table entry with another note.
    fn with_live(&self, raw: u64, live: u16) -> u64;

    /// Index of the entry for `iova` in a table of `level`.
    #[inline]
    fn index(&self, level: Level, iova: Iova) -> usize {
        let mask = (self.entries(level) as u64).wrapping_sub(1);
        (iova.get().wrapping_shr(self.shift(level)) & mask) as usize
    }
}
