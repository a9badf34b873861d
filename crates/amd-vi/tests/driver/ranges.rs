//! Commands cover the range of a request as the unit interprets them.

use proptest::prelude::*;
use ringfence_types::{CachedLevels, Invalidation, Pfn, PfnRange};

use crate::model::invalidated;
use crate::rig::{DOMAIN, FEATURE, Rig, invalidate};

/// Bounds with all numbers of significant bits.
fn page() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0_u32..52).prop_map(|(raw, bits)| raw >> 12 >> bits)
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    prop_oneof![
        (page(), page()).prop_map(|(a, b)| (a.min(b), a.max(b))),
        (page(), 0_u64..4096).prop_map(|(a, more)| (a, (a + more).min(u64::MAX >> 12))),
    ]
}

proptest! {
    #[test]
    fn commands_cover_the_range_and_less_than_twice_as_much(
        (lo, hi) in range(),
        all in any::<bool>(),
    ) {
        let rig = Rig::new(FEATURE);
        let mut unit = rig.unit();
        rig.executed();
        let range = PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap();
        let levels = if all { CachedLevels::All } else { CachedLevels::Leaves };
        invalidate(&mut unit, Invalidation::Pages { domain: DOMAIN, range, levels });
        let executed = rig.executed();
        let (wait, commands) = executed.split_last().unwrap();
        prop_assert_eq!(wait[0] >> 60, 1);
        prop_assert!(commands.len() <= 2);
        let mut next = lo;
        let mut covered = 0_u128;
        for [first, second] in commands {
            prop_assert_eq!(*first, 3 << 60 | u64::from(DOMAIN.get()) << 32);
            prop_assert_eq!(second & 2 != 0, all);
            let (from, to) = invalidated(*second);
            prop_assert!(from <= next, "{next:#x} is not covered");
            next = to.saturating_add(1);
            covered += u128::from(to - from) + 1;
        }
        prop_assert!(next > hi, "{hi:#x} is not covered");
        // A block of 2^52 bytes widens to all pages.
        let pages = u128::from(hi - lo) + 1;
        prop_assert!(covered < 2 * pages || pages > 1 << 38, "{covered} for {pages}");
    }
}
