//! The second-stage ("second-level") page table of Intel VT-d.
//!
//! Bits as in the VT-d specification, section 9.8 "Second-Level Paging Entries":
//!
//! | bits | name | meaning |
//! |---|---|---|
//! | 0 | R | reads allowed; an entry with R = W = 0 is not present |
//! | 1 | W | writes allowed |
//! | 7 | SP (PS) | at levels 2 and 3: the entry maps a 2 MiB or 1 GiB page |
//! | 11 | SNP | in leaves: device accesses snoop CPU caches; reserved in table entries |
//! | 12..=51 | ADDR | table or page; bits below the page size are reserved |
//! | 52..=61, 63 | | ignored by hardware, used by software |
//! | 62 | TM | reserved without device TLBs |
//!
//! [`with_contiguous_hint`](SecondStage::with_contiguous_hint) gives bit 52 of level 1 leaves the
//! meaning that Arm's VMSAv8-64 gives it. No VT-d unit has this extension.

use ringfence_types::{PageSize, Permissions, PhysAddr};

use crate::{Entry, Format, Level};

/// R and W: the entry is present if either is set.
const RW: u64 = 0b11;
/// SP: the entry maps a page instead of pointing to a table.
const SP: u64 = 1 << 7;
/// SNP: device accesses snoop CPU caches.
const SNP: u64 = 1 << 11;
/// ADDR: physical address.
const ADDR: u64 = 0x000f_ffff_ffff_f000;
/// TM, reserved if the unit does not support device TLBs.
const TM: u64 = 1 << 62;
/// Contiguous: the bit that VMSAv8-64 uses.
const CONTIGUOUS: u64 = 1 << 52;
/// Binary logarithm of the number of entries of a contiguous leaf.
const CONTIGUOUS_RUN: u32 = 4;
/// Software bit: [`Format::WRITTEN_BACK`].
const WRITTEN_BACK: u64 = 1 << 63;

/// Depth of the table. It determines the address width (adjusted guest address width).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Levels {
    /// Three levels translate 39 bits.
    Three,
    /// Four levels translate 48 bits.
    Four,
    /// Five levels translate 57 bits.
    Five,
}

impl Levels {
    /// All depths, smallest first.
    pub const ALL: [Self; 3] = [Self::Three, Self::Four, Self::Five];

    /// Returns the number of translated address bits.
    #[inline]
    pub const fn width(self) -> u32 {
        match self {
            Self::Three => 39,
            Self::Four => 48,
            Self::Five => 57,
        }
    }

    /// Returns the level of the root.
    #[inline]
    pub const fn root(self) -> Level {
        match self {
            Self::Three => Level::THREE,
            Self::Four => Level::FOUR,
            Self::Five => Level::FIVE,
        }
    }
}

/// Snooping of CPU caches by device accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Snoop {
    /// Each access snoops if the device requests it.
    AsRequested,
    /// Every access snoops: SNP is set in every leaf.
    Forced,
}

/// VT-d second-stage format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SecondStage {
    levels: Levels,
    largest: PageSize,
    snp: u64,
    contiguous: bool,
}

impl SecondStage {
    /// A table of the given depth with 4 KiB leaves only, as the Linux DMA API uses for small
    /// buffers.
    #[inline]
    pub const fn new(levels: Levels) -> Self {
        Self {
            levels,
            largest: PageSize::Size4K,
            snp: 0,
            contiguous: false,
        }
    }

    /// Adds the contiguous hint, which lets the unit cache 16 entries as one. Not part of VT-d.
    #[inline]
    pub const fn with_contiguous_hint(mut self) -> Self {
        self.contiguous = true;
        self
    }

    /// Allows leaves up to `largest` (capability field SLLPS).
    #[inline]
    pub const fn with_pages_up_to(mut self, largest: PageSize) -> Self {
        self.largest = largest;
        self
    }

    /// Sets or clears SNP in all leaves (extended capability SC).
    #[inline]
    pub const fn with_snoop(mut self, snoop: Snoop) -> Self {
        self.snp = match snoop {
            Snoop::AsRequested => 0,
            Snoop::Forced => SNP,
        };
        self
    }

    /// Returns the depth of the table.
    #[inline]
    pub const fn levels(&self) -> Levels {
        self.levels
    }

    /// Returns the largest leaf size allowed.
    #[inline]
    pub const fn largest(&self) -> PageSize {
        self.largest
    }
}

impl Format for SecondStage {
    const WRITTEN_BACK: u64 = WRITTEN_BACK;

    #[inline]
    fn root_level(&self) -> Level {
        self.levels.root()
    }

    #[inline]
    fn width(&self) -> u32 {
        self.levels.width()
    }

    #[inline]
    fn physical_bits(&self) -> u32 {
        52
    }

    #[inline]
    fn leaf_size(&self, level: Level) -> Option<PageSize> {
        level.page_size().filter(|size| *size <= self.largest)
    }

    #[inline]
    fn may_be_run(&self, raw: u64) -> bool {
        self.contiguous && raw & CONTIGUOUS != 0
    }

    #[inline]
    fn decode(&self, level: Level, raw: u64) -> Entry {
        let Some(permissions) = Permissions::from_bits(raw) else {
            return Entry::Absent;
        };
        // At level 1, bit 7 is ignored. Above, it marks a leaf where the format allows one and is
        // reserved elsewhere.
        if level == Level::LEAF || raw & SP != 0 {
            let Some(size) = self.leaf_size(level) else {
                return Entry::Reserved;
            };
            let below_page = (size.bytes() - 1) & ADDR;
            if raw & (TM | below_page) != 0 {
                return Entry::Reserved;
            }
            let base = PhysAddr::new(raw & ADDR);
            if self.contiguous && level == Level::LEAF && raw & CONTIGUOUS != 0 {
                return Entry::Leaf {
                    base: base.align_down(PageSize::Size64K.bytes()),
                    size: PageSize::Size64K,
                    permissions,
                };
            }
            return Entry::Leaf {
                base,
                size,
                permissions,
            };
        }
        let Some(next) = level.below() else {
            return Entry::Reserved;
        };
        if raw & (TM | SNP) != 0 {
            return Entry::Reserved;
        }
        Entry::Table {
            at: PhysAddr::new(raw & ADDR),
            next,
            permissions,
        }
    }

    #[inline]
    fn is_absent(&self, raw: u64) -> bool {
        raw & RW == 0
    }

    #[inline]
    fn descend(&self, _level: Level, raw: u64) -> Option<PhysAddr> {
        // One comparison, without a check of TM: this runs three times per map.
        (raw & (RW | SP | SNP) == RW).then(|| PhysAddr::new(raw & ADDR))
    }

    #[inline]
    fn leaf(&self, level: Level, base: PhysAddr, permissions: Permissions) -> u64 {
        let sp = if level == Level::LEAF { 0 } else { SP };
        (base.get() & ADDR) | permissions.bits() | self.snp | sp
    }

    #[inline]
    fn has_runs(&self) -> bool {
        self.contiguous
    }

    #[inline]
    fn leaf_run(&self, level: Level, most: u32) -> u32 {
        if self.contiguous && level == Level::LEAF && most >= CONTIGUOUS_RUN {
            CONTIGUOUS_RUN
        } else {
            0
        }
    }

    #[inline]
    fn leaf_of_run(&self, level: Level, at: PhysAddr, run: u32, permissions: Permissions) -> u64 {
        let hint = if run == CONTIGUOUS_RUN { CONTIGUOUS } else { 0 };
        self.leaf(level, at, permissions) | hint
    }

    #[inline]
    fn table(&self, _level: Level, at: PhysAddr) -> u64 {
        (at.get() & ADDR) | RW
    }
}
