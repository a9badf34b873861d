//! The page tables of the RISC-V IOMMU: Sv39, Sv48 and Sv57 of its first stage, and Sv39x4, Sv48x4
//! and Sv57x4 of its second stage.
//!
//! Bits as in "The RISC-V Instruction Set Manual, Volume II: Privileged Architecture", section
//! "Sv39: Page-Based 39-bit Virtual-Memory System", with the extensions Svnapot and Svpbmt. The
//! second stage: section "Guest Physical Address Translation" of the hypervisor extension.
//!
//! | bits | name | meaning |
//! |---|---|---|
//! | 0 | V | present |
//! | 1, 2, 3 | R, W, X | permissions of a page; all zero: the entry points to a table |
//! | 4 | U | user access; requests without a PASID, and the second stage, need it |
//! | 5 | G | the mapping is global; never set |
//! | 6, 7 | A, D | accessed, dirty; software sets both, so the hardware never writes or faults |
//! | 8..=9 | RSW | ignored by hardware, used by software |
//! | 10..=53 | PPN | page number of the table or page |
//! | 54..=60 | | reserved |
//! | 61..=62 | PBMT | memory type of a page (Svpbmt); otherwise reserved |
//! | 63 | N | with PPN bits 0 to 3 = 1000: one of 16 entries of a 64 KiB page (Svnapot) |
//!
//! The format has no write-only pages: a writable page also allows reads. A table entry has two
//! free bits, so [`Format::COUNTS`] is false.

use ringfence_types::{Iova, PageSize, Permissions, PhysAddr};

use crate::{Entry, Format, Level, Levels};

const V: u64 = 1;
const R: u64 = 1 << 1;
const W: u64 = 1 << 2;
const X: u64 = 1 << 3;
const U: u64 = 1 << 4;
const A: u64 = 1 << 6;
const D: u64 = 1 << 7;
const PPN_SHIFT: u32 = 10;
const PPN: u64 = 0x003f_ffff_ffff_fc00;
const PBMT_SHIFT: u32 = 61;
const PBMT: u64 = 0b11 << PBMT_SHIFT;
const N: u64 = 1 << 63;
const RESERVED: u64 = 0x7f << 54;
/// The four lowest bits of the page number, and their value in an entry of a 64 KiB page.
const NAPOT: u64 = 0b1111 << PPN_SHIFT;
const NAPOT_64K: u64 = 0b1000 << PPN_SHIFT;
/// Binary logarithm of the entries of a 64 KiB page.
const NAPOT_RUN: u32 = 4;
/// Software bit: [`Format::WRITTEN_BACK`], the lower bit of RSW.
const WRITTEN_BACK: u64 = 1 << 8;

/// Memory type of a page (Svpbmt).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MemoryType {
    /// PMA: the physical memory attributes decide.
    Platform = 0,
    /// NC: non-cacheable, idempotent, weakly ordered.
    NonCacheable = 1,
    /// IO: non-cacheable, non-idempotent, strongly ordered.
    Io = 2,
}

/// RISC-V page table format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RiscV {
    levels: Levels,
    second_stage: bool,
    largest: PageSize,
    napot: bool,
    memory_type: Option<MemoryType>,
}

impl RiscV {
    /// First stage: Sv39, Sv48 or Sv57, with 4 KiB pages only. Addresses are sign-extended.
    #[inline]
    pub const fn first_stage(levels: Levels) -> Self {
        Self {
            levels,
            second_stage: false,
            largest: PageSize::Size4K,
            napot: false,
            memory_type: None,
        }
    }

    /// Second stage: Sv39x4, Sv48x4 or Sv57x4, with 4 KiB pages only. The root has 16 KiB.
    #[inline]
    pub const fn second_stage(levels: Levels) -> Self {
        let mut format = Self::first_stage(levels);
        format.second_stage = true;
        format
    }

    /// Allows pages of one entry up to `largest`; the hardware has them at every level.
    #[inline]
    pub const fn with_pages_up_to(mut self, largest: PageSize) -> Self {
        self.largest = largest;
        self
    }

    /// Uses 64 KiB pages (extension Svnapot).
    #[inline]
    pub const fn with_napot(mut self) -> Self {
        self.napot = true;
        self
    }

    /// Gives every page `memory_type` (extension Svpbmt).
    #[inline]
    pub const fn with_memory_type(mut self, memory_type: MemoryType) -> Self {
        self.memory_type = Some(memory_type);
        self
    }

    /// Returns the size of a page of one entry at `level`.
    #[inline]
    fn entry_size(&self, level: Level) -> Option<PageSize> {
        PageSize::from_shift(self.shift(level))
    }

    fn page(&self, level: Level, raw: u64) -> Entry {
        let napot = raw & N != 0;
        let unknown_type = match self.memory_type {
            Some(_) => raw & PBMT == PBMT,
            None => raw & PBMT != 0,
        };
        let misused = napot && (!self.napot || level != Level::LEAF || raw & NAPOT != NAPOT_64K);
        // Without U or A a device must not use the page. Writable pages are readable.
        if raw & (U | A | R) != U | A | R || unknown_type || misused {
            return Entry::Reserved;
        }
        let shift = match napot {
            true => self.shift(level) + NAPOT_RUN,
            false => self.shift(level),
        };
        let Some(size) = PageSize::from_shift(shift) else {
            return Entry::Reserved;
        };
        let address = address_of(raw);
        let below = size.bytes().wrapping_sub(1);
        if !napot && address & below != 0 {
            return Entry::Reserved;
        }
        // The hardware faults at a write to a page that is not dirty.
        let permissions = match raw & (W | D) == W | D {
            true => Permissions::READ_WRITE,
            false => Permissions::READ,
        };
        Entry::Leaf {
            base: PhysAddr::new(address & !below),
            size,
            permissions,
        }
    }
}

/// Returns the address of the page or table in an entry.
#[inline]
const fn address_of(raw: u64) -> u64 {
    (raw & PPN) >> PPN_SHIFT << 12
}

/// Returns the page number field of an entry for the page or table at `at`.
#[inline]
const fn number_of(at: PhysAddr) -> u64 {
    at.get() >> 12 << PPN_SHIFT & PPN
}

/// Returns the bits of `raw` on both sides of the page number, without [`WRITTEN_BACK`]. The
/// rotation makes them fit a constant of 32 bits, which the descent compares at each level.
#[inline]
const fn attributes(raw: u64) -> u32 {
    const ATTRIBUTES: u64 = !(PPN | WRITTEN_BACK);
    raw.rotate_left(PPN_SHIFT) as u32 & ATTRIBUTES.rotate_left(PPN_SHIFT) as u32
}

impl Format for RiscV {
    const COUNTS: bool = false;
    const WRITTEN_BACK: u64 = WRITTEN_BACK;

    #[inline]
    fn root_level(&self) -> Level {
        self.levels.root()
    }

    #[inline]
    fn width(&self) -> u32 {
        self.levels.width() + if self.second_stage { 2 } else { 0 }
    }

    /// First stage: bits above the width repeat its highest bit. Second stage: they are zero.
    #[inline]
    fn translates(&self, iova: Iova) -> bool {
        let unused = 64 - self.width();
        match self.second_stage {
            true => iova.get() >> self.width() == 0,
            false => (iova.get() << unused) as i64 >> unused == iova.get() as i64,
        }
    }

    #[inline]
    fn physical_bits(&self) -> u32 {
        56
    }

    /// The root of the second stage has four times as many entries as other tables.
    #[inline]
    fn entries(&self, level: Level) -> usize {
        if self.second_stage && level == self.root_level() {
            2048
        } else {
            512
        }
    }

    #[inline]
    fn root_alignment(&self) -> u64 {
        (self.entries(self.root_level()) as u64) * 8
    }

    #[inline]
    fn leaf_size(&self, level: Level) -> Option<PageSize> {
        self.entry_size(level).filter(|size| *size <= self.largest)
    }

    #[inline]
    fn has_runs(&self) -> bool {
        true
    }

    #[inline]
    fn leaf_run(&self, level: Level, most: u32) -> u32 {
        if self.napot && level == Level::LEAF && most >= NAPOT_RUN {
            NAPOT_RUN
        } else {
            0
        }
    }

    #[inline]
    fn may_be_run(&self, raw: u64) -> bool {
        raw & N != 0
    }

    #[inline]
    fn decode(&self, level: Level, raw: u64) -> Entry {
        if raw & V == 0 {
            return Entry::Absent;
        }
        if raw & RESERVED != 0 {
            return Entry::Reserved;
        }
        if raw & (R | W | X) != 0 {
            return self.page(level, raw);
        }
        // In a table entry U, A, D, PBMT and N are reserved.
        match level.below() {
            Some(next) if raw & (U | A | D | PBMT | N) == 0 => Entry::Table {
                at: PhysAddr::new(address_of(raw)),
                next,
                permissions: Permissions::READ_WRITE,
            },
            _ => Entry::Reserved,
        }
    }

    #[inline]
    fn is_absent(&self, raw: u64) -> bool {
        raw & V == 0
    }

    #[inline]
    fn descend(&self, _level: Level, raw: u64) -> Option<PhysAddr> {
        // The bits above the page number are zero, so the shift alone gives the address.
        (attributes(raw) == attributes(V)).then(|| PhysAddr::new(raw >> PPN_SHIFT << 12))
    }

    /// A writable leaf also allows reads.
    #[inline]
    fn leaf(&self, _level: Level, base: PhysAddr, permissions: Permissions) -> u64 {
        let write = if permissions.contains(Permissions::WRITE) {
            W | D
        } else {
            0
        };
        let memory_type = self.memory_type.map_or(0, |kind| kind as u64) << PBMT_SHIFT;
        number_of(base) | memory_type | V | R | U | A | write
    }

    #[inline]
    fn leaf_of_run(&self, level: Level, at: PhysAddr, run: u32, permissions: Permissions) -> u64 {
        let leaf = self.leaf(level, at, permissions);
        if run == 0 {
            return leaf;
        }
        leaf & !NAPOT | NAPOT_64K | N
    }

    #[inline]
    fn table(&self, _level: Level, at: PhysAddr) -> u64 {
        number_of(at) | V
    }
}
