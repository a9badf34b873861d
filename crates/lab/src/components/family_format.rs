//! The table formats of the families beside VT-d, as one format.

use ringfence_pgtable::{AmdV1, Arm, Entry, Format, Granule4K, Level, Levels, RiscV};
use ringfence_types::{Iova, PageSize, Permissions, PhysAddr};

use crate::iommu_family::IommuFamily;

/// A format of four levels, of AMD-Vi, SMMUv3 or RISC-V. One type for all keeps the compile time of
/// the modes that use it; each call selects the format.
#[derive(Debug, Clone, Copy)]
pub enum FamilyFormat {
    /// AMD-Vi, host tables ("v1").
    AmdVi(AmdV1),
    /// SMMUv3, stage 1.
    Smmuv3(Arm<Granule4K>),
    /// RISC-V, first stage.
    RiscV(RiscV),
}

impl FamilyFormat {
    /// Returns the format of `family` with leaves of up to `largest`; `None` for VT-d. Leaves of 64
    /// KiB consist of 16 entries: a page of AMD-Vi with its size in the address, a contiguous leaf
    /// of Arm, a Svnapot page of RISC-V.
    pub fn new(family: IommuFamily, largest: PageSize) -> Option<Self> {
        let small = largest == PageSize::Size4K;
        Some(match family {
            IommuFamily::Vtd => return None,
            IommuFamily::AmdVi => Self::AmdVi(AmdV1::new(Level::new(4)?).with_pages_up_to(largest)),
            IommuFamily::Smmuv3 => {
                let format = Arm::stage1(48)?.with_pages_up_to(largest);
                Self::Smmuv3(match small {
                    true => format,
                    false => format.with_contiguous_hint(),
                })
            }
            IommuFamily::RiscV => {
                let format = RiscV::first_stage(Levels::Four).with_pages_up_to(largest);
                Self::RiscV(match small {
                    true => format,
                    false => format.with_napot(),
                })
            }
        })
    }
}

/// Calls a method of the selected format.
macro_rules! of {
    ($self:ident, $format:ident => $call:expr) => {
        match $self {
            FamilyFormat::AmdVi($format) => $call,
            FamilyFormat::Smmuv3($format) => $call,
            FamilyFormat::RiscV($format) => $call,
        }
    };
}

impl Format for FamilyFormat {
    const COUNTS: bool = false;
    /// Bit 8 of a table entry, which all three ignore.
    const WRITTEN_BACK: u64 = 1 << 8;

    #[inline]
    fn root_level(&self) -> Level {
        of!(self, format => format.root_level())
    }

    #[inline]
    fn width(&self) -> u32 {
        of!(self, format => format.width())
    }

    #[inline]
    fn translates(&self, iova: Iova) -> bool {
        of!(self, format => format.translates(iova))
    }

    #[inline]
    fn physical_bits(&self) -> u32 {
        of!(self, format => format.physical_bits())
    }

    #[inline]
    fn root_alignment(&self) -> u64 {
        of!(self, format => format.root_alignment())
    }

    #[inline]
    fn leaf_size(&self, level: Level) -> Option<PageSize> {
        of!(self, format => format.leaf_size(level))
    }

    #[inline]
    fn has_runs(&self) -> bool {
        of!(self, format => format.has_runs())
    }

    #[inline]
    fn leaf_run(&self, level: Level, most: u32) -> u32 {
        of!(self, format => format.leaf_run(level, most))
    }

    #[inline]
    fn may_be_run(&self, raw: u64) -> bool {
        of!(self, format => format.may_be_run(raw))
    }

    #[inline]
    fn decode(&self, level: Level, raw: u64) -> Entry {
        of!(self, format => format.decode(level, raw))
    }

    #[inline]
    fn is_absent(&self, raw: u64) -> bool {
        of!(self, format => format.is_absent(raw))
    }

    #[inline]
    fn descend(&self, level: Level, raw: u64) -> Option<PhysAddr> {
        let raw = raw & !Self::WRITTEN_BACK;
        of!(self, format => format.descend(level, raw))
    }

    #[inline]
    fn leaf(&self, level: Level, base: PhysAddr, permissions: Permissions) -> u64 {
        of!(self, format => format.leaf(level, base, permissions))
    }

    #[inline]
    fn leaf_of_run(&self, level: Level, at: PhysAddr, run: u32, permissions: Permissions) -> u64 {
        of!(self, format => format.leaf_of_run(level, at, run, permissions))
    }

    #[inline]
    fn table(&self, level: Level, at: PhysAddr) -> u64 {
        of!(self, format => format.table(level, at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAMILIES: [IommuFamily; 3] =
        [IommuFamily::AmdVi, IommuFamily::Smmuv3, IommuFamily::RiscV];

    /// The software bit changes nothing that the hardware or the software reads in a table entry.
    #[test]
    fn the_software_bit_is_ignored_in_tables() {
        for family in FAMILIES {
            let format = FamilyFormat::new(family, PageSize::Size2M).unwrap();
            for level in (2..=4).map(|level| Level::new(level).unwrap()) {
                let at = PhysAddr::new(0x1234_5000);
                let entry = format.table(level, at);
                let marked = entry | FamilyFormat::WRITTEN_BACK;
                assert_ne!(entry, marked, "{family:?}");
                for raw in [entry, marked] {
                    assert_eq!(format.descend(level, raw), Some(at), "{family:?}");
                    let next = level.below().unwrap();
                    assert!(
                        matches!(
                            format.decode(level, raw),
                            Entry::Table { at: found, next: below, .. }
                                if found == at && below == next
                        ),
                        "{family:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn all_families_have_four_levels_and_leaves_of_16_entries() {
        for family in FAMILIES {
            for (largest, run) in [(PageSize::Size4K, 0), (PageSize::Size64K, 4)] {
                let format = FamilyFormat::new(family, largest).unwrap();
                assert_eq!((format.root_level().get(), format.width()), (4, 48));
                assert_eq!(format.leaf_run(Level::LEAF, 9), run, "{family:?}");
                let above = Level::LEAF.above().unwrap();
                assert_eq!(format.leaf_size(above), None, "{family:?}");
            }
            let format = FamilyFormat::new(family, PageSize::Size2M).unwrap();
            let above = Level::LEAF.above().unwrap();
            assert_eq!(format.leaf_size(above), Some(PageSize::Size2M));
        }
        assert!(FamilyFormat::new(IommuFamily::Vtd, PageSize::Size4K).is_none());
    }

    #[test]
    fn write_only_pages_are_those_of_the_family() {
        for family in FAMILIES {
            let format = FamilyFormat::new(family, PageSize::Size4K).unwrap();
            let raw = format.leaf(Level::LEAF, PhysAddr::ZERO, Permissions::WRITE);
            let Entry::Leaf { permissions, .. } = format.decode(Level::LEAF, raw) else {
                panic!("{family:?}");
            };
            let write_only = permissions == Permissions::WRITE;
            assert_eq!(write_only, family.has_write_only_pages(), "{family:?}");
        }
    }
}
