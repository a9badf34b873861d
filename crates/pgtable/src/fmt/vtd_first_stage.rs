//! The first-stage page table of Intel VT-d, which has the format of a processor's page table.
//!
//! Bits as in the VT-d specification, section 9.7 "First-Level Paging Entries":
//!
//! | bits | name | meaning |
//! |---|---|---|
//! | 0 | P | present: reads allowed |
//! | 1 | R/W | writes allowed |
//! | 2 | U/S | user access allowed; a device's requests without a PASID are user requests |
//! | 5, 6 | A, D | accessed, dirty; software sets both, so the hardware never writes |
//! | 7 | PS | at levels 2 and 3: the entry maps a 2 MiB or 1 GiB page |
//! | 12..=51 | ADDR | table or page; bits below the page size are reserved |
//! | 9..=11, 52..=62 | | ignored by hardware, used by software |
//!
//! The format has no write-only pages: a writable page also allows reads. With extended accessed
//! flags, hardware also writes bit 10 (EA) of entries, which this crate ignores. XD (bit 63)
//! forbids only instruction fetches.
//!
//! The guest page table of AMD-Vi ("v2") is the same format: AMD I/O Virtualization Technology
//! (IOMMU) Specification, section 2.2.6 "I/O Page Tables for Guest Translations".

use ringfence_types::{Iova, PageSize, Permissions, PhysAddr};

use crate::{Entry, Format, Level, Levels};

const P: u64 = 1;
const RW: u64 = 1 << 1;
const US: u64 = 1 << 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const ADDR: u64 = 0x000f_ffff_ffff_f000;
/// Software bit: [`Format::WRITTEN_BACK`].
const WRITTEN_BACK: u64 = 1 << 62;

/// VT-d first-stage format. All addresses in it are guest-physical if a second stage follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FirstStage {
    levels: Levels,
    largest: PageSize,
}

/// AMD-Vi guest format ("v2") of four or five levels.
pub type AmdV2 = FirstStage;

impl FirstStage {
    /// Creates the format of four or five levels with 4 KiB leaves only. `None` for three levels,
    /// which the hardware does not walk.
    pub const fn new(levels: Levels) -> Option<Self> {
        if matches!(levels, Levels::Three) {
            return None;
        }
        Some(Self {
            levels,
            largest: PageSize::Size4K,
        })
    }

    /// A table of four levels with 4 KiB leaves only, as Linux uses.
    pub const FOUR_LEVELS: Self = Self {
        levels: Levels::Four,
        largest: PageSize::Size4K,
    };

    /// Allows leaves up to `largest`.
    #[inline]
    pub const fn with_pages_up_to(mut self, largest: PageSize) -> Self {
        self.largest = largest;
        self
    }
}

/// The granted permissions; an entry without U/S grants none to a device.
const fn permissions(raw: u64) -> Option<Permissions> {
    if raw & US == 0 {
        return None;
    }
    if raw & RW == 0 {
        Some(Permissions::READ)
    } else {
        Some(Permissions::READ_WRITE)
    }
}

impl Format for FirstStage {
    const WRITTEN_BACK: u64 = WRITTEN_BACK;

    #[inline]
    fn root_level(&self) -> Level {
        self.levels.root()
    }

    #[inline]
    fn width(&self) -> u32 {
        self.levels.width()
    }

    /// Addresses are canonical: bits above the width repeat its highest bit (section 3.6).
    #[inline]
    fn translates(&self, iova: Iova) -> bool {
        let unused = 64 - self.width();
        (iova.get() << unused) as i64 >> unused == iova.get() as i64
    }

    #[inline]
    fn physical_bits(&self) -> u32 {
        52
    }

    #[inline]
    fn leaf_size(&self, level: Level) -> Option<PageSize> {
        level.page_size().filter(|size| *size <= self.largest)
    }

    /// An entry without U/S decodes as reserved: a device must not use it.
    #[inline]
    fn decode(&self, level: Level, raw: u64) -> Entry {
        if raw & P == 0 {
            return Entry::Absent;
        }
        let Some(permissions) = permissions(raw) else {
            return Entry::Reserved;
        };
        // At level 1, bit 7 selects a memory type.
        if level == Level::LEAF || raw & PS != 0 {
            let Some(size) = self.leaf_size(level) else {
                return Entry::Reserved;
            };
            // Bit 12 of a large page selects a memory type; this model requires 0.
            if raw & (size.bytes() - 1) & ADDR != 0 {
                return Entry::Reserved;
            }
            return Entry::Leaf {
                base: PhysAddr::new(raw & ADDR),
                size,
                permissions,
            };
        }
        let Some(next) = level.below() else {
            return Entry::Reserved;
        };
        Entry::Table {
            at: PhysAddr::new(raw & ADDR),
            next,
            permissions,
        }
    }

    #[inline]
    fn is_absent(&self, raw: u64) -> bool {
        raw & P == 0
    }

    #[inline]
    fn descend(&self, _level: Level, raw: u64) -> Option<PhysAddr> {
        (raw & (P | RW | US | PS) == P | RW | US).then(|| PhysAddr::new(raw & ADDR))
    }

    /// A writable leaf also allows reads.
    #[inline]
    fn leaf(&self, level: Level, base: PhysAddr, permissions: Permissions) -> u64 {
        let ps = if level == Level::LEAF { 0 } else { PS };
        let rw = if permissions.contains(Permissions::WRITE) {
            RW | D
        } else {
            0
        };
        (base.get() & ADDR) | P | US | A | rw | ps
    }

    #[inline]
    fn table(&self, _level: Level, at: PhysAddr) -> u64 {
        (at.get() & ADDR) | P | RW | US | A
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bits() {
        let format = FirstStage::FOUR_LEVELS.with_pages_up_to(PageSize::Size2M);
        let base = PhysAddr::new(0x1_2340_0000);
        let leaf = |level: Level, permissions| Entry::Leaf {
            base,
            size: level.page_size().expect("4 KiB or 2 MiB"),
            permissions,
        };
        for (level, permissions, raw, seen) in [
            (
                Level::LEAF,
                Permissions::READ,
                0x1_2340_0025,
                Permissions::READ,
            ),
            (
                Level::LEAF,
                Permissions::WRITE,
                0x1_2340_0067,
                Permissions::READ_WRITE,
            ),
            (
                Level::TWO,
                Permissions::READ_WRITE,
                0x1_2340_00e7,
                Permissions::READ_WRITE,
            ),
        ] {
            assert_eq!(format.leaf(level, base, permissions), raw);
            assert_eq!(format.decode(level, raw), leaf(level, seen));
        }
        let table = format.table(Level::TWO, base);
        assert_eq!(table, 0x1_2340_0027);
        assert_eq!(
            format.decode(Level::TWO, table),
            Entry::Table {
                at: base,
                next: Level::LEAF,
                permissions: Permissions::READ_WRITE
            }
        );
        assert_eq!(format.descend(Level::TWO, table), Some(base));
        for (level, raw) in [
            // For supervisors only.
            (Level::LEAF, 0x1_2340_0023),
            // A large page at the wrong level, of the wrong size, or not aligned.
            (Level::FOUR, 0x1_2340_00e7),
            (Level::THREE, 0x1_2340_00e7),
            (Level::TWO, 0x1_2340_10e7),
        ] {
            assert_eq!(format.decode(level, raw), Entry::Reserved, "{raw:#x}");
        }
        assert_eq!(format.decode(Level::LEAF, 0x1_2340_0066), Entry::Absent);
        assert_eq!(FirstStage::new(Levels::Three), None);
    }

    /// VT-d specification, section 3.6: input addresses are canonical, with 4 and with 5 levels.
    #[test]
    fn canonical_addresses() {
        for (levels, width) in [(Levels::Four, 48), (Levels::Five, 57)] {
            let format = FirstStage::new(levels).expect("exists");
            let half = 1_u64 << (width - 1);
            for (iova, translated) in [
                (0, true),
                (half - 1, true),
                (half, false),
                (half * 2 - 1, false),
                (half.wrapping_neg() - 1, false),
                (half.wrapping_neg(), true),
                (u64::MAX, true),
            ] {
                assert_eq!(format.translates(Iova::new(iova)), translated, "{iova:#x}");
            }
            assert_eq!(format.width(), width);
            assert_eq!(format.index(format.root_level(), Iova::new(u64::MAX)), 511);
        }
    }

    /// AMD specification, section 2.2.6: the words of the AMD-Vi guest format are the same.
    #[test]
    fn amd_v2() {
        let format = AmdV2::new(Levels::Five).expect("exists");
        let format = format.with_pages_up_to(PageSize::Size1G);
        let base = PhysAddr::new(0xf_ffff_c000_0000);
        let word = format.leaf(Level::THREE, base, Permissions::READ_WRITE);
        assert_eq!(word, 0x000f_ffff_c000_00e7);
        assert_eq!(format.table(Level::FIVE, base), 0x000f_ffff_c000_0027);
        // NX and the ignored bits change nothing.
        let leaf = format.decode(Level::THREE, word);
        for ignored in [7 << 9, 0x7ff << 52, 1 << 63, 1 << 8] {
            assert_eq!(format.decode(Level::THREE, word | ignored), leaf);
        }
    }
}
