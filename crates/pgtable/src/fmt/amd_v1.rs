//! The host page table of AMD-Vi ("v1").
//!
//! Bits as in the AMD I/O Virtualization Technology (IOMMU) Specification, 48882, section 2.2.3
//! "I/O Page Tables for Host Translations":
//!
//! | bits | name | meaning |
//! |---|---|---|
//! | 0 | PR | present |
//! | 5, 6 | A, D | accessed, dirty; hardware writes them if HAD of the device table allows |
//! | 9..=11 | Next Level | 1 to 6: a table of that level; 0 and 7: a page |
//! | 12..=51 | Address | table or page |
//! | 59 | U | in pages: for ATS only; reserved in tables |
//! | 60 | FC | in pages: accesses snoop CPU caches; reserved in tables |
//! | 61 | IR | reads allowed |
//! | 62 | IW | writes allowed |
//! | 1..=4, 7, 8, 63 | | ignored by hardware, used by software |
//! | 52..=58 | | reserved |
//!
//! With Next Level = 0, the page has the size of one entry. With 7, the lowest zero of the address
//! bits from 12 up gives the size: bit 12 for 8 KiB, 13 for 16 KiB, and so on. Every entry that
//! such a page covers holds the same word. The driver must leave HAD clear.
//!
//! A table entry has no ten adjacent ignored bits, so [`Format::COUNTS`] is false.

use ringfence_types::{Iova, PageSize, Permissions, PhysAddr};

use crate::{Entry, Format, Level, Snoop};

const PR: u64 = 1;
const NEXT_LEVEL_SHIFT: u32 = 9;
const NEXT_LEVEL: u64 = 7 << NEXT_LEVEL_SHIFT;
/// Next Level of a page whose address gives its size.
const SIZE_IN_ADDRESS: u64 = 7 << NEXT_LEVEL_SHIFT;
const ADDR: u64 = 0x000f_ffff_ffff_f000;
const FC: u64 = 1 << 60;
const PERMISSIONS_SHIFT: u32 = 61;
const IR_IW: u64 = 0b11 << PERMISSIONS_SHIFT;
/// Bits that must be zero in tables, and in pages (bit 59 is U there, which only matters to ATS).
const RESERVED_IN_TABLE: u64 = 0x1ff << 52;
const RESERVED_IN_PAGE: u64 = 0x7f << 52;
/// Software bit: [`Format::WRITTEN_BACK`].
const WRITTEN_BACK: u64 = 1 << 63;
/// The largest page that this crate writes: a run of 256 entries of 1 GiB. Some hardware does not
/// translate the next size, 512 GiB.
const LARGEST: u32 = 38;

/// AMD-Vi host format ("v1") of one to six levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AmdV1 {
    levels: Level,
    largest: PageSize,
    fc: u64,
}

impl AmdV1 {
    /// A table of `levels` levels (the Mode field of the device table entry) with 4 KiB pages only.
    #[inline]
    pub const fn new(levels: Level) -> Self {
        Self {
            levels,
            largest: PageSize::Size4K,
            fc: 0,
        }
    }

    /// Allows pages of every power of two up to `largest`, and at most 256 GiB.
    #[inline]
    pub const fn with_pages_up_to(mut self, largest: PageSize) -> Self {
        self.largest = largest;
        self
    }

    /// Sets or clears FC in all pages.
    #[inline]
    pub const fn with_snoop(mut self, snoop: Snoop) -> Self {
        self.fc = match snoop {
            Snoop::AsRequested => 0,
            Snoop::Forced => FC,
        };
        self
    }

    /// Decodes a page at `level`.
    #[inline]
    fn page(&self, level: Level, raw: u64, permissions: Permissions) -> Entry {
        let own = self.shift(level);
        let sized = raw & NEXT_LEVEL == SIZE_IN_ADDRESS;
        let shift = match sized {
            true => 13 + ((raw & ADDR) >> 12).trailing_ones(),
            false => own,
        };
        let in_table = shift < own + self.entries(level).trailing_zeros();
        let Some(size) = PageSize::from_shift(shift).filter(|_| shift >= own && in_table) else {
            return Entry::Reserved;
        };
        let address = raw & ADDR;
        let below = size.bytes().wrapping_sub(1);
        // Without an encoded size, an address bit below the page is reserved.
        if raw & RESERVED_IN_PAGE != 0 || shift > 51 || !sized && address & below != 0 {
            return Entry::Reserved;
        }
        Entry::Leaf {
            base: PhysAddr::new(address & !below),
            size,
            permissions,
        }
    }
}

impl Format for AmdV1 {
    const COUNTS: bool = false;
    const WRITTEN_BACK: u64 = WRITTEN_BACK;

    #[inline]
    fn root_level(&self) -> Level {
        self.levels
    }

    /// Six levels translate all 64 bits.
    #[inline]
    fn width(&self) -> u32 {
        (12 + 9 * u32::from(self.levels.get())).min(64)
    }

    #[inline]
    fn translates(&self, iova: Iova) -> bool {
        iova.get().checked_shr(self.width()).unwrap_or(0) == 0
    }

    #[inline]
    fn physical_bits(&self) -> u32 {
        52
    }

    /// Level 6 selects 7 bits, so its table uses 128 entries.
    #[inline]
    fn entries(&self, level: Level) -> usize {
        if level == Level::MAX { 128 } else { 512 }
    }

    #[inline]
    fn leaf_size(&self, level: Level) -> Option<PageSize> {
        level.page_size().filter(|size| *size <= self.largest)
    }

    #[inline]
    fn has_runs(&self) -> bool {
        true
    }

    #[inline]
    fn leaf_run(&self, level: Level, most: u32) -> u32 {
        let largest = self.largest.shift().min(LARGEST);
        most.min(8).min(largest.saturating_sub(self.shift(level)))
    }

    #[inline]
    fn may_be_run(&self, raw: u64) -> bool {
        raw & NEXT_LEVEL != 0
    }

    #[inline]
    fn decode(&self, level: Level, raw: u64) -> Entry {
        if raw & PR == 0 {
            return Entry::Absent;
        }
        // A present entry without IR and IW is valid and grants nothing.
        let Some(permissions) = Permissions::from_bits(raw >> PERMISSIONS_SHIFT) else {
            return Entry::Reserved;
        };
        let next = ((raw & NEXT_LEVEL) >> NEXT_LEVEL_SHIFT) as u8;
        match Level::new(next) {
            None => self.page(level, raw, permissions),
            Some(next) if next < level && raw & RESERVED_IN_TABLE == 0 => Entry::Table {
                at: PhysAddr::new(raw & ADDR),
                next,
                permissions,
            },
            Some(_) => Entry::Reserved,
        }
    }

    #[inline]
    fn is_absent(&self, raw: u64) -> bool {
        raw & PR == 0
    }

    #[inline]
    fn descend(&self, level: Level, raw: u64) -> Option<PhysAddr> {
        (raw & !(ADDR | WRITTEN_BACK) == self.table(level, PhysAddr::ZERO))
            .then(|| PhysAddr::new(raw & ADDR))
    }

    #[inline]
    fn leaf(&self, _level: Level, base: PhysAddr, permissions: Permissions) -> u64 {
        (base.get() & ADDR) | permissions.bits() << PERMISSIONS_SHIFT | self.fc | PR
    }

    #[inline]
    fn leaf_of_run(&self, level: Level, at: PhysAddr, run: u32, permissions: Permissions) -> u64 {
        let leaf = self.leaf(level, at, permissions);
        if run == 0 {
            return leaf;
        }
        let bytes = 1_u64.wrapping_shl(self.shift(level).wrapping_add(run));
        // All address bits below the highest of the page are ones, and that one is zero.
        let size = (bytes >> 1).wrapping_sub(1) & ADDR;
        leaf & !(bytes.wrapping_sub(1) & ADDR) | size | SIZE_IN_ADDRESS
    }

    #[inline]
    fn table(&self, level: Level, at: PhysAddr) -> u64 {
        let next = u64::from(level.get().saturating_sub(1));
        (at.get() & ADDR) | IR_IW | next << NEXT_LEVEL_SHIFT | PR
    }
}
