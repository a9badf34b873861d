//! Commands cover the range of a request as the unit interprets them.

use proptest::prelude::*;
use ringfence_pgtable::Level;
use ringfence_smmu_v3::{PageTable, Translation};
use ringfence_types::{CachedLevels, Invalidation, PageSize, Pfn, PfnRange, PhysAddr};

use crate::caches::invalidated;
use crate::rig::{DEVICE, DOMAIN, Rig, invalidate};

const PAGES: u64 = 1 << 36;

/// Bounds with all numbers of significant bits.
fn page() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0_u32..36).prop_map(|(raw, bits)| raw >> 28 >> bits)
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    prop_oneof![
        (page(), page()).prop_map(|(a, b)| (a.min(b), a.max(b))),
        (page(), 0_u64..4096).prop_map(|(a, more)| (a, (a + more).min(PAGES - 1))),
    ]
}

fn granule() -> impl Strategy<Value = (PageSize, u8, u32)> {
    prop_oneof![
        Just((PageSize::Size4K, 4, 48)),
        Just((PageSize::Size16K, 4, 48)),
        Just((PageSize::Size64K, 3, 48)),
    ]
}

proptest! {
    #[test]
    fn commands_cover_the_range_and_little_more(
        (lo, hi) in range(),
        (granule, levels, width) in granule(),
        all in any::<bool>(),
        has_ranges in any::<bool>(),
    ) {
        let rig = if has_ranges { Rig::new() } else { Rig::without_ranges() };
        let mut unit = rig.unit();
        let level = Level::new(levels).unwrap();
        let root = PhysAddr::new(0x60_0000);
        let table = PageTable { root, width, level, granule, forced_write_back: false };
        unit.attach(DEVICE, DOMAIN, &Translation::Stage1(table)).unwrap();
        rig.commands();
        let range = PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap();
        let levels = if all { CachedLevels::All } else { CachedLevels::Leaves };
        invalidate(&mut unit, Invalidation::Pages { domain: DOMAIN, range, levels });
        let executed = rig.commands();
        let (sync, commands) = executed.split_last().unwrap();
        prop_assert_eq!(*sync, [0x46, 0]);
        if commands == [[0x0005_0000_0000_0011, 0]] {
            // The domain: only where commands would be many.
            let shift = granule.shift() - 12;
            let granules = (hi >> shift) - (lo >> shift) + 1;
            prop_assert!(!has_ranges && granules > 32, "{granules} granules");
            return Ok(());
        }
        let most = if has_ranges { 2 } else { 32 };
        prop_assert!(commands.len() <= most);
        let start = lo << 12 & !(granule.bytes() - 1);
        let end = u128::from((hi + 1) << 12).next_multiple_of(granule.bytes().into());
        let mut next = start;
        for command in commands {
            prop_assert_eq!(command[0] & 0xffff_ffff_0000_00ff, 0x0005_0000_0000_0012);
            prop_assert_eq!(command[1] & 1, u64::from(!all));
            let (from, mut to) = invalidated(*command);
            prop_assert_eq!(from % granule.bytes(), 0);
            if command[1] >> 10 & 3 == 0 {
                // Entries of any granule that contain the address.
                to = from + granule.bytes() - 1;
            } else {
                prop_assert_eq!(command[1] >> 10 & 3, u64::from((granule.shift() - 10) / 2));
            }
            prop_assert!(from <= next, "{next:#x} is not covered");
            next = to.saturating_add(1);
        }
        prop_assert!(u128::from(next) >= end, "{end:#x} is not covered");
        // Five bits of the rest of five bits: less than one part in 256 more.
        let (covered, wanted) = (next - start, end - u128::from(start));
        prop_assert!(u128::from(covered) - wanted <= wanted / 256, "{covered:#x}, {wanted:#x}");
    }
}
