//! The page tables of Arm SMMUv3: VMSAv8-64 stage 1 and stage 2.
//!
//! Bits as in the Arm Architecture Reference Manual (DDI 0487), section D8.3 "Translation table
//! descriptor formats":
//!
//! | bits | name | meaning |
//! |---|---|---|
//! | 0 | | valid |
//! | 1 | | 1: a table, or a page at level 1; 0: a block of a higher level |
//! | 2..=4 | AttrIndx | stage 1: memory type, an index into MAIR; this crate writes 0 |
//! | 2..=5 | MemAttr | stage 2: memory type; write-back cacheable, 1111, or 0110 if it is forced |
//! | 6 | AP\[1\] | stage 1: unprivileged access; requests of devices are unprivileged |
//! | 7 | AP\[2\] | stage 1: no writes |
//! | 6, 7 | S2AP | stage 2: reads, writes |
//! | 8..=9 | SH | shareability; this crate writes 11, inner shareable |
//! | 10 | AF | accessed; software sets it, so the hardware neither writes nor faults |
//! | 11 | nG | stage 1: the TLB entry belongs to the ASID |
//! | 12..=47 | | address; bits below the granule or the block are zero |
//! | 52 | Contiguous | one of several entries that one TLB entry may hold |
//! | 61, 62 | APTable | stage 1 table: no unprivileged access, no writes below |
//! | 2..=11, 51..=58 | | table: ignored by hardware, used by software |
//!
//! Arm numbers lookup levels from the root; [`Level::LEAF`] is lookup level 3. Addresses have 48
//! bits. Stage 1 has no write-only pages: a writable page also allows reads.
//!
//! # Contiguous hint
//! The TLB may hold all entries of a contiguous leaf as one, so an entry must not change from valid
//! to valid: break-before-make (section D8.16.1). Map and unmap handle a leaf as a whole, and a new
//! map of the range follows the invalidation of the old one.

use core::fmt;
use core::marker::PhantomData;

use ringfence_types::{PageSize, Permissions, PhysAddr};

use crate::{Entry, Format, Level};

const VALID: u64 = 1;
/// Type bit: a table, or a page at [`Level::LEAF`].
const TABLE_OR_PAGE: u64 = 1 << 1;
/// Write-back cacheable, unless stage 1 has a weaker type.
const MEM_ATTR_WRITE_BACK: u64 = 0b1111 << 2;
/// Write-back cacheable whatever stage 1 has, under S2FWB.
const MEM_ATTR_FORCED_WRITE_BACK: u64 = 0b0110 << 2;
const AP_UNPRIVILEGED: u64 = 1 << 6;
const AP_READ_ONLY: u64 = 1 << 7;
const S2AP_SHIFT: u32 = 6;
const SH_INNER: u64 = 0b11 << 8;
const AF: u64 = 1 << 10;
const NG: u64 = 1 << 11;
const ADDR: u64 = 0x0000_ffff_ffff_f000;
/// Address bits 48 to 50, which exist only with larger physical addresses.
const ABOVE_48: u64 = 0b111 << 48;
const CONTIGUOUS: u64 = 1 << 52;
const AP_TABLE_PRIVILEGED: u64 = 1 << 61;
const AP_TABLE_READ_ONLY: u64 = 1 << 62;
/// Software bit: [`Format::WRITTEN_BACK`].
const WRITTEN_BACK: u64 = 1 << 55;
/// Software field of a table entry: number of present entries in the table.
const LIVE_SHIFT: u32 = 2;
const LIVE: u64 = 0x3ff << LIVE_SHIFT;
/// Physical address bits, without the extensions for larger addresses.
const PHYSICAL_BITS: u32 = 48;
/// The most tables that a stage 2 root concatenates, as a binary logarithm.
const CONCATENATED: u32 = 4;

/// The size of the tables of an Arm format, and the leaves that follow from it.
pub trait Granule: Copy + fmt::Debug {
    /// Size of a table and of the smallest page.
    const SIZE: PageSize;
    /// Binary logarithms of the number of entries of a contiguous leaf, from level 1 up.
    const CONTIGUOUS: [u32; 3];
    /// The highest level with leaves.
    const LEAF_LEVELS: u8;
}

/// 4 KiB: blocks of 2 MiB and 1 GiB, 16 contiguous entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granule4K {}
/// 16 KiB: blocks of 32 MiB, 128 contiguous pages or 32 contiguous blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granule16K {}
/// 64 KiB: blocks of 512 MiB, 32 contiguous entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granule64K {}

impl Granule for Granule4K {
    const SIZE: PageSize = PageSize::Size4K;
    const CONTIGUOUS: [u32; 3] = [4, 4, 4];
    const LEAF_LEVELS: u8 = 3;
}

impl Granule for Granule16K {
    const SIZE: PageSize = PageSize::Size16K;
    const CONTIGUOUS: [u32; 3] = [7, 5, 0];
    const LEAF_LEVELS: u8 = 2;
}

impl Granule for Granule64K {
    const SIZE: PageSize = PageSize::Size64K;
    const CONTIGUOUS: [u32; 3] = [5, 5, 0];
    const LEAF_LEVELS: u8 = 2;
}

/// Stage of translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    One,
    Two,
}

/// Arm VMSAv8-64 format with granule `G`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arm<G> {
    stage: Stage,
    width: u32,
    root: Level,
    largest: PageSize,
    contiguous: bool,
    forced_write_back: bool,
    granule: PhantomData<G>,
}

impl<G: Granule> Arm<G> {
    /// Address bits that a level selects.
    const BITS: u32 = G::SIZE.shift() - 3;

    /// Stage 1 (TTBR0) for addresses of `width` bits, 25 to 48, with pages of one granule only.
    pub const fn stage1(width: u32) -> Option<Self> {
        Self::new(Stage::One, width)
    }

    /// Stage 2 for addresses of `width` bits, 25 to 48, with pages of one granule only. A root of
    /// at most 16 entries is left out; its tables are concatenated instead (section D8.2.2). With
    /// 4 KiB granule the walk begins at level 2 or above: beginning at level 3 needs support for
    /// small translation tables (SMMU_IDR3.STT).
    pub const fn stage2(width: u32) -> Option<Self> {
        Self::new(Stage::Two, width)
    }

    const fn new(stage: Stage, width: u32) -> Option<Self> {
        if width < 25 || width > 48 {
            return None;
        }
        let selected = width - G::SIZE.shift();
        let mut levels = selected.div_ceil(Self::BITS);
        let of_root = selected - (levels - 1) * Self::BITS;
        let least = if G::SIZE.shift() > PageSize::Size4K.shift() {
            1
        } else {
            2
        };
        if matches!(stage, Stage::Two) && levels > least && of_root <= CONCATENATED {
            levels -= 1;
        }
        let Some(root) = Level::new(levels as u8) else {
            return None;
        };
        Some(Self {
            stage,
            width,
            root,
            largest: G::SIZE,
            contiguous: false,
            forced_write_back: false,
            granule: PhantomData,
        })
    }

    /// Allows blocks, and contiguous leaves, up to `largest`.
    #[inline]
    pub const fn with_pages_up_to(mut self, largest: PageSize) -> Self {
        self.largest = largest;
        self
    }

    /// Sets the contiguous hint where all entries of a contiguous leaf are mapped.
    #[inline]
    pub const fn with_contiguous_hint(mut self) -> Self {
        self.contiguous = true;
        self
    }

    /// Makes memory write-back cacheable whatever memory types a guest's stage 1 selects, so that
    /// its devices cannot bypass the CPU caches. No effect on stage 1. Every walk of the table must
    /// have S2FWB, which gives the field another meaning (DDI 0487, section D8.6.6).
    #[inline]
    pub const fn with_forced_write_back(mut self) -> Self {
        self.forced_write_back = matches!(self.stage, Stage::Two);
        self
    }

    /// Returns true if every walk of the table must have S2FWB.
    #[inline]
    pub const fn is_forced_write_back(&self) -> bool {
        self.forced_write_back
    }

    /// Returns the binary logarithm of the number of entries of a contiguous leaf at `level`; zero
    /// if the level has none, or if the root is smaller.
    #[inline]
    fn contiguous_run(&self, level: Level) -> u32 {
        let run = G::CONTIGUOUS.get(usize::from(level.get()).wrapping_sub(1));
        let run = run.copied().unwrap_or(0);
        if self.entries(level) >> run == 0 {
            0
        } else {
            run
        }
    }

    /// Returns the size of a page or block at `level`.
    #[inline]
    fn block(&self, level: Level) -> Option<PageSize> {
        if level.get() > G::LEAF_LEVELS {
            return None;
        }
        PageSize::from_shift(self.shift(level))
    }

    #[inline]
    fn permissions(&self, raw: u64) -> Option<Permissions> {
        match self.stage {
            Stage::Two => Permissions::from_bits(raw >> S2AP_SHIFT),
            Stage::One if raw & AP_UNPRIVILEGED == 0 => None,
            Stage::One if raw & AP_READ_ONLY != 0 => Some(Permissions::READ),
            Stage::One => Some(Permissions::READ_WRITE),
        }
    }

    fn leaf_entry(&self, level: Level, raw: u64) -> Entry {
        let (Some(size), Some(permissions)) = (self.block(level), self.permissions(raw)) else {
            return Entry::Reserved;
        };
        let address = raw & ADDR;
        // An access to a page that is not marked accessed faults.
        if raw & AF == 0 || raw & ABOVE_48 != 0 || address & (size.bytes() - 1) != 0 {
            return Entry::Reserved;
        }
        let run = match raw & CONTIGUOUS != 0 {
            true => self.contiguous_run(level),
            false => 0,
        };
        let Some(size) = PageSize::from_shift(size.shift() + run) else {
            return Entry::Reserved;
        };
        Entry::Leaf {
            base: PhysAddr::new(address & !(size.bytes() - 1)),
            size,
            permissions,
        }
    }

    fn table_entry(&self, level: Level, raw: u64) -> Entry {
        let of_stage_1 = self.stage == Stage::One;
        let permissions = match raw & AP_TABLE_READ_ONLY != 0 && of_stage_1 {
            true => Permissions::READ,
            false => Permissions::READ_WRITE,
        };
        let barred = of_stage_1 && raw & AP_TABLE_PRIVILEGED != 0;
        let misaligned = raw & ADDR & (G::SIZE.bytes() - 1) != 0;
        match level.below() {
            Some(next) if raw & ABOVE_48 == 0 && !barred && !misaligned => Entry::Table {
                at: PhysAddr::new(raw & ADDR),
                next,
                permissions,
            },
            _ => Entry::Reserved,
        }
    }
}

impl<G: Granule> Format for Arm<G> {
    const GRANULE: PageSize = G::SIZE;
    /// Larger tables have more entries than the ten ignored bits can count.
    const COUNTS: bool = G::SIZE.shift() == PageSize::Size4K.shift();
    const WRITTEN_BACK: u64 = WRITTEN_BACK;

    #[inline]
    fn root_level(&self) -> Level {
        self.root
    }

    #[inline]
    fn width(&self) -> u32 {
        self.width
    }

    #[inline]
    fn physical_bits(&self) -> u32 {
        PHYSICAL_BITS
    }

    #[inline]
    fn shift(&self, level: Level) -> u32 {
        G::SIZE.shift() + Self::BITS * (u32::from(level.get()) - 1)
    }

    /// The root has as many entries as the width needs: fewer than a table, or several tables.
    #[inline]
    fn entries(&self, level: Level) -> usize {
        if level == self.root {
            1 << (self.width - self.shift(level))
        } else {
            1 << Self::BITS
        }
    }

    #[inline]
    fn root_alignment(&self) -> u64 {
        (self.entries(self.root) as u64 * 8).max(G::SIZE.bytes())
    }

    #[inline]
    fn leaf_size(&self, level: Level) -> Option<PageSize> {
        self.block(level).filter(|size| *size <= self.largest)
    }

    #[inline]
    fn has_runs(&self) -> bool {
        self.contiguous
    }

    #[inline]
    fn leaf_run(&self, level: Level, most: u32) -> u32 {
        let run = self.contiguous_run(level);
        if self.contiguous && most >= run && self.shift(level) + run <= self.largest.shift() {
            run
        } else {
            0
        }
    }

    #[inline]
    fn may_be_run(&self, raw: u64) -> bool {
        self.contiguous && raw & CONTIGUOUS != 0
    }

    #[inline]
    fn decode(&self, level: Level, raw: u64) -> Entry {
        if raw & VALID == 0 {
            return Entry::Absent;
        }
        match (level == Level::LEAF, raw & TABLE_OR_PAGE != 0) {
            (true, true) | (false, false) => self.leaf_entry(level, raw),
            (false, true) => self.table_entry(level, raw),
            (true, false) => Entry::Reserved,
        }
    }

    #[inline]
    fn is_absent(&self, raw: u64) -> bool {
        raw & VALID == 0
    }

    #[inline]
    fn descend(&self, _level: Level, raw: u64) -> Option<PhysAddr> {
        let address = ADDR & !(G::SIZE.bytes() - 1);
        (raw & !(address | LIVE | WRITTEN_BACK) == VALID | TABLE_OR_PAGE)
            .then(|| PhysAddr::new(raw & address))
    }

    /// A writable leaf of stage 1 also allows reads.
    #[inline]
    fn leaf(&self, level: Level, base: PhysAddr, permissions: Permissions) -> u64 {
        let page = if level == Level::LEAF {
            TABLE_OR_PAGE
        } else {
            0
        };
        let memory = match self.forced_write_back {
            true => MEM_ATTR_FORCED_WRITE_BACK,
            false => MEM_ATTR_WRITE_BACK,
        };
        let attributes = match self.stage {
            Stage::Two => memory | permissions.bits() << S2AP_SHIFT,
            Stage::One if permissions.contains(Permissions::WRITE) => AP_UNPRIVILEGED | NG,
            Stage::One => AP_UNPRIVILEGED | AP_READ_ONLY | NG,
        };
        (base.get() & ADDR) | attributes | SH_INNER | AF | page | VALID
    }

    #[inline]
    fn leaf_of_run(&self, level: Level, at: PhysAddr, run: u32, permissions: Permissions) -> u64 {
        let hint = if run == 0 { 0 } else { CONTIGUOUS };
        self.leaf(level, at, permissions) | hint
    }

    #[inline]
    fn table(&self, _level: Level, at: PhysAddr) -> u64 {
        (at.get() & ADDR) | TABLE_OR_PAGE | VALID
    }

    /// Bits 2 to 11, which the hardware ignores in a table entry.
    #[inline]
    fn live(&self, raw: u64) -> u16 {
        ((raw & LIVE) >> LIVE_SHIFT) as u16
    }

    #[inline]
    fn with_live(&self, raw: u64, live: u16) -> u64 {
        (raw & !LIVE) | ((u64::from(live) << LIVE_SHIFT) & LIVE)
    }
}
