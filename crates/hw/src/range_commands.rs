//! The commands by which drivers of AMD-Vi, SMMUv3 and RISC-V units invalidate a range of pages.
//! They decide which other translations an invalidation removes.
//!
//! For AMD-Vi and RISC-V they are those of this project's drivers. Linux sends AMD-Vi one command
//! for the enclosing aligned block (`build_inv_address`), and RISC-V one command for each page of a
//! range below 2 MiB. For SMMUv3 they are those of Linux (`arm_smmu_cmdq_batch_add_range` with
//! `FEAT_RANGE_INV`). This project's driver sends at most two, and rounds the second one up to five
//! bits of the number of pages.

use ringfence_types::{CachedLevels, Invalidation, Pfn, PfnRange};

/// The invalidation commands of a family of units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RangeCommands {
    /// AMD-Vi: `INVALIDATE_IOMMU_PAGES` (48882, section 2.4.3) names a power of two of pages that
    /// is aligned to its size. A driver covers a range with at most two commands, and less than
    /// twice its pages. PDE selects the walk caches.
    AmdVi,
    /// SMMUv3.2: `CMD_TLBI_NH_VA` with a range (IHI 0070, section 4.4.1.1) names (NUM + 1) x
    /// 2^SCALE pages with NUM up to 31. Leaf = 0 selects the walk caches. Linux splits a range
    /// exactly with Leaf = 1. With Leaf = 0 it adds a page if the number of pages is 1 modulo 32.
    Smmuv3,
    /// RISC-V, version 1.0: `IOTINVAL.VMA` names one page, and then removes leaf entries only. A
    /// driver sends up to [`RISCV_PAGES`] of them. For longer ranges, and for the walk caches, it
    /// invalidates the address space (AV = 0).
    RiscV,
}

/// The most pages that the RISC-V driver invalidates one by one, with the default of its option
/// `page_commands`; Linux: 511.
pub const RISCV_PAGES: u64 = 32;

/// The most pages of one size that Linux names in a range command of SMMUv3
/// (`CMDQ_TLBI_RANGE_NUM_MAX`). The command could name 32.
const SMMU_NUM: u64 = 31;

/// The most pages of a range whose commands have a SCALE of five bits.
const SMMU_PAGES: u64 = u32::MAX as u64;

impl RangeCommands {
    /// Calls `each` with the invalidation that each command for `request` performs.
    pub fn split(self, request: &Invalidation, mut each: impl FnMut(Invalidation)) {
        let Invalidation::Pages {
            domain,
            range,
            levels,
        } = *request
        else {
            return each(*request);
        };
        let pages = |range| Invalidation::Pages {
            domain,
            range,
            levels,
        };
        match self {
            Self::AmdVi => {
                let (first, second) = range.cover();
                for block in [Some(first), second].into_iter().flatten() {
                    each(pages(PfnRange::from(block)));
                }
            }
            Self::Smmuv3 if range.pages() > SMMU_PAGES => each(Invalidation::Domain(domain)),
            Self::Smmuv3 => scaled(&range, levels, |range| each(pages(range))),
            Self::RiscV if levels == CachedLevels::All || range.pages() > RISCV_PAGES => {
                each(Invalidation::Domain(domain));
            }
            Self::RiscV => {
                for page in range.lo().get()..=range.hi().get() {
                    if let Some(range) = PfnRange::new(Pfn::new(page), 1) {
                        each(pages(range));
                    }
                }
            }
        }
    }
}

/// Splits a range as Linux does: up to 31 pages of the largest size that divides the rest.
fn scaled(range: &PfnRange, levels: CachedLevels, mut each: impl FnMut(PfnRange)) {
    let (mut at, mut left) = (range.lo().get(), range.pages());
    // With Leaf = 0, Linux keeps SCALE and NUM from being 0 together.
    if levels == CachedLevels::All && left & SMMU_NUM == 1 {
        left = left.saturating_add(1);
    }
    while left > 0 {
        let scale = left.trailing_zeros();
        let count = (left >> scale & SMMU_NUM) << scale;
        let Some(part) = PfnRange::new(Pfn::new(at), count) else {
            return each(*range);
        };
        each(part);
        at = at.wrapping_add(count);
        left = left.saturating_sub(count);
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use ringfence_types::DomainId;

    use super::*;

    const DOMAIN: DomainId = DomainId::new(3);

    fn request(lo: u64, hi: u64, levels: CachedLevels) -> Invalidation {
        Invalidation::Pages {
            domain: DOMAIN,
            range: PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap(),
            levels,
        }
    }

    /// Returns the first and last pages of the commands for leaves; `None` for the whole domain.
    fn commands(of: RangeCommands, lo: u64, hi: u64) -> Vec<Option<(u64, u64)>> {
        commands_of(of, CachedLevels::Leaves, lo, hi)
    }

    fn commands_of(
        of: RangeCommands,
        wanted: CachedLevels,
        lo: u64,
        hi: u64,
    ) -> Vec<Option<(u64, u64)>> {
        let mut found = Vec::new();
        of.split(&request(lo, hi, wanted), |command| {
            found.push(match command {
                Invalidation::Pages { range, levels, .. } => {
                    assert_eq!(levels, wanted);
                    Some((range.lo().get(), range.hi().get()))
                }
                other => {
                    assert_eq!(other, Invalidation::Domain(DOMAIN));
                    None
                }
            });
        });
        found
    }

    #[test]
    fn commands_are_those_of_the_family() {
        use RangeCommands::{AmdVi, RiscV, Smmuv3};
        let one = |lo, hi| [Some((lo, hi))].to_vec();
        for of in [AmdVi, Smmuv3, RiscV] {
            assert_eq!(commands(of, 7, 7), one(7, 7));
        }
        // Aligned powers of two, which may be wider than the range.
        assert_eq!(commands(AmdVi, 4, 7), one(4, 7));
        assert_eq!(commands(AmdVi, 5, 7), [Some((5, 5)), Some((6, 7))]);
        assert_eq!(commands(AmdVi, 3, 4), [Some((3, 3)), Some((4, 4))]);
        assert_eq!(commands(AmdVi, 3, 8), [Some((0, 7)), Some((8, 8))]);
        assert_eq!(commands(AmdVi, 0, Pfn::MAX.get()), one(0, Pfn::MAX.get()));
        // Up to 31 pages of one size, without any other page.
        assert_eq!(commands(Smmuv3, 3, 33), one(3, 33));
        assert_eq!(commands(Smmuv3, 5, 5 + 63), one(5, 68));
        assert_eq!(commands(Smmuv3, 0, 32), [Some((0, 0)), Some((1, 32))]);
        // SCALE has five bits.
        assert_eq!(commands(Smmuv3, 0, SMMU_PAGES - 1).len(), 7);
        assert_eq!(commands(Smmuv3, 0, SMMU_PAGES), [None]);
        assert_eq!(commands(Smmuv3, 0, Pfn::MAX.get()), [None]);
        assert_eq!(commands(RiscV, 2, 4), [2, 3, 4].map(|at| Some((at, at))));
        assert_eq!(commands(RiscV, 1, RISCV_PAGES).len() as u64, RISCV_PAGES);
        assert_eq!(commands(RiscV, 0, RISCV_PAGES), [None]);
    }

    #[test]
    fn riscv_has_no_range_for_the_walk_caches() {
        for of in [RangeCommands::AmdVi, RangeCommands::Smmuv3] {
            of.split(&request(4, 7, CachedLevels::All), |command| {
                assert_eq!(command, request(4, 7, CachedLevels::All));
            });
        }
        RangeCommands::RiscV.split(&request(4, 4, CachedLevels::All), |command| {
            assert_eq!(command, Invalidation::Domain(DOMAIN));
        });
        for other in [Invalidation::Global, Invalidation::Domain(DOMAIN)] {
            RangeCommands::RiscV.split(&other, |command| assert_eq!(command, other));
        }
    }

    /// Linux, with Leaf = 0: `if ((num_pages & CMDQ_TLBI_RANGE_NUM_MAX) == 1) num_pages++`.
    #[test]
    fn smmuv3_adds_a_page_for_the_walk_caches_as_linux_does() {
        for (pages, expected) in [
            (1, vec![(0, 1)]),
            (2, vec![(0, 1)]),
            (32, vec![(0, 31)]),
            (33, vec![(0, 33)]),
            (34, vec![(0, 33)]),
            // 66 pages are one pair and 64 pages.
            (65, vec![(0, 1), (2, 65)]),
            (512, vec![(0, 511)]),
        ] {
            let found = commands_of(RangeCommands::Smmuv3, CachedLevels::All, 0, pages - 1);
            let expected: Vec<_> = expected.into_iter().map(Some).collect();
            assert_eq!(found, expected, "{pages} pages");
        }
        let last = Pfn::MAX.get();
        let found = commands_of(RangeCommands::Smmuv3, CachedLevels::All, last, last);
        assert_eq!(found, [Some((last, last))], "no page follows");
    }

    #[test]
    fn all_commands_together_cover_the_range() {
        for lo in 0..70_u64 {
            for hi in lo..140 {
                let pages = hi - lo + 1;
                for of in [
                    RangeCommands::AmdVi,
                    RangeCommands::Smmuv3,
                    RangeCommands::RiscV,
                ] {
                    let found = commands(of, lo, hi);
                    let Some(found) = found.into_iter().collect::<Option<Vec<_>>>() else {
                        assert!(of == RangeCommands::RiscV && pages > RISCV_PAGES);
                        continue;
                    };
                    let mut next = lo;
                    let mut total = 0;
                    for (first, last) in &found {
                        assert!(*first <= next && *last >= next, "{of:?} {lo} {hi}");
                        next = last + 1;
                        total += last - first + 1;
                    }
                    assert!(next > hi, "{of:?} {lo} {hi}");
                    match of {
                        RangeCommands::AmdVi => {
                            assert!(found.len() <= 2 && total < 2 * pages, "{lo} {hi}");
                        }
                        _ => assert_eq!(total, pages, "{of:?} {lo} {hi}"),
                    }
                }
            }
        }
    }
}
