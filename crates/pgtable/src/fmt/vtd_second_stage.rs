//! The second-stage ("second-level") table of Intel VT-d: HW03, HW04.
//!
//! Bits as in the VT-d specification, section 9.8 "Second-Level Paging Entries":
//!
//! | bits | name | meaning |
//! |---|---|---|
//! | 0 | R | reads allowed; an entry with R = W = 0 is not present |
//! | 1 | W | writes allowed |
//! | 7 | SP (PS) | at levels 2 and 3: the entry maps a 2 MiB or 1 GiB page |
//! | 11 | SNP | in leaves: snoop the processor's caches on the device's access; reserved in table entries |
//! | 12..=51 | ADDR | table, or page; the bits below the page's size are reserved |
//! | 52..=61, 63 | | ignored by hardware: ours |
//! | 62 | TM | reserved without device TLBs |

use ringfence_types::{PageSize, Permissions, PhysAddr, TABLE_WORDS};

use crate::{Entry, Format, Level};

/// R and W: the entry is present if either is set.
const RW: u64 = 0b11;
/// SP: a page, not a table.
const SP: u64 = 1 << 7;
/// SNP.
const SNP: u64 = 1 << 11;
/// ADDR.
const ADDR: u64 = 0x000f_ffff_ffff_f000;
/// TM, reserved where device TLBs are not supported.
const TM: u64 = 1 << 62;
/// Ours: how many entries of the table behind a table entry are present, 0 to 512.
const LIVE_SHIFT: u32 = 52;
const LIVE: u64 = 0x3ff << LIVE_SHIFT;
/// Ours: [`Format::WRITTEN_BACK`].
const WRITTEN_BACK: u64 = 1 << 63;

/// Depth of the table, hence width of the address space (adjusted guest address width).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Levels {
    /// 39 bits.
    Three,
    /// 48 bits.
    Four,
    /// 57 bits.
    Five,
}

impl Levels {
    /// All depths.
    pub const ALL: [Self; 3] = [Self::Three, Self::Four, Self::Five];

    /// Address bits translated.
    #[inline]
    pub const fn width(self) -> u32 {
        match self {
            Self::Three => 39,
            Self::Four => 48,
            Self::Five => 57,
        }
    }

    /// The level of the root.
    #[inline]
    pub const fn root(self) -> Level {
        match self {
            Self::Three => Level::THREE,
            Self::Four => Level::FOUR,
            Self::Five => Level::MAX,
        }
    }
}

impl Level {
    pub(crate) const TWO: Self = match Self::new(2) {
        Some(level) => level,
        None => Self::LEAF,
    };
    pub(crate) const THREE: Self = match Self::new(3) {
        Some(level) => level,
        None => Self::LEAF,
    };
    pub(crate) const FOUR: Self = match Self::new(4) {
        Some(level) => level,
        None => Self::LEAF,
    };
}

/// Whether the device's accesses snoop the processor's caches whatever the device asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Snoop {
    /// As the device asks.
    AsRequested,
    /// Always: SNP is set in every leaf.
    Forced,
}

/// VT-d second-stage format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SecondStage {
    levels: Levels,
    largest: PageSize,
    snp: u64,
}

impl SecondStage {
    /// A table of the given depth with 4 KiB leaves only, as Linux's DMA API builds for small
    /// buffers.
    #[inline]
    pub const fn new(levels: Levels) -> Self {
        Self {
            levels,
            largest: PageSize::Size4K,
            snp: 0,
        }
    }

    /// Allows leaves up to `largest` (capability field SLLPS).
    #[inline]
    pub const fn with_pages_up_to(mut self, largest: PageSize) -> Self {
        self.largest = largest;
        self
    }

    /// Sets SNP in every leaf, or not (extended capability SC).
    #[inline]
    pub const fn with_snoop(mut self, snoop: Snoop) -> Self {
        self.snp = match snoop {
            Snoop::AsRequested => 0,
            Snoop::Forced => SNP,
        };
        self
    }

    /// Depth of the table.
    #[inline]
    pub const fn levels(&self) -> Levels {
        self.levels
    }

    /// The largest leaf allowed.
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
    fn shift(&self, level: Level) -> u32 {
        3 + 9 * u32::from(level.get())
    }

    #[inline]
    fn entries(&self, _level: Level) -> usize {
        TABLE_WORDS
    }

    #[inline]
    fn leaf_size(&self, level: Level) -> Option<PageSize> {
        let size = match level {
            Level::LEAF => PageSize::Size4K,
            Level::TWO => PageSize::Size2M,
            Level::THREE => PageSize::Size1G,
            _ => return None,
        };
        (size <= self.largest).then_some(size)
    }

    #[inline]
    fn decode(&self, level: Level, raw: u64) -> Entry {
        let Some(permissions) = Permissions::from_bits(raw) else {
            return Entry::Absent;
        };
        // At level 1 bit 7 is ignored; above, it makes a leaf where one can stand and is reserved
        // elsewhere.
        if level == Level::LEAF || raw & SP != 0 {
            let Some(size) = self.leaf_size(level) else {
                return Entry::Reserved;
            };
            let below_page = (size.bytes() - 1) & ADDR;
            if raw & (TM | below_page) != 0 {
                return Entry::Reserved;
            }
            return Entry::Leaf {
                base: PhysAddr::new(raw & ADDR),
                permissions,
            };
        }
        if raw & (TM | SNP) != 0 {
            return Entry::Reserved;
        }
        Entry::Table {
            at: PhysAddr::new(raw & ADDR),
            permissions,
        }
    }

    #[inline]
    fn is_absent(&self, raw: u64) -> bool {
        raw & RW == 0
    }

    #[inline]
    fn descend(&self, raw: u64) -> Option<PhysAddr> {
        // One comparison, and TM left to the hardware: this runs three times per map.
        (raw & (RW | SP | SNP) == RW).then(|| PhysAddr::new(raw & ADDR))
    }

    #[inline]
    fn leaf(&self, level: Level, base: PhysAddr, permissions: Permissions) -> u64 {
        let sp = if level == Level::LEAF { 0 } else { SP };
        (base.get() & ADDR) | permissions.bits() | self.snp | sp
    }

    #[inline]
    fn table(&self, at: PhysAddr) -> u64 {
        (at.get() & ADDR) | RW
    }

    #[inline]
    fn live(&self, raw: u64) -> u16 {
        ((raw & LIVE) >> LIVE_SHIFT) as u16
    }

    #[inline]
    fn with_live(&self, raw: u64, live: u16) -> u64 {
        (raw & !LIVE) | ((u64::from(live) << LIVE_SHIFT) & LIVE)
    }
}
