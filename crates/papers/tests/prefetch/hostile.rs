//! Any page, any size, any order: no panic, and never more entries than configured.

use proptest::prelude::*;
use ringfence_papers::prefetch::{
    Distance, MAX_HISTORY, Markov, PrefetchConfig, Prefetcher, PrefetchingIotlb, Recency, RingPair,
    Variant,
};
use ringfence_types::Pfn;

fn page() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..4_u64,
        Just(Pfn::MAX.get()),
        Just(u64::MAX),
        Just(1 << 51)
    ]
}

fn size() -> impl Strategy<Value = u32> {
    prop_oneof![0..6_u32, Just(MAX_HISTORY), Just(u32::MAX)]
}

fn drive<P: Prefetcher>(
    config: PrefetchConfig,
    entries: u32,
    buffered: u32,
    steps: &[(u8, u64, bool)],
) -> Result<(), TestCaseError> {
    let mut iotlb = PrefetchingIotlb::<P>::new(config, entries, buffered);
    for &(kind, page, mapped) in steps {
        let page = Pfn::new(page);
        match kind {
            // A table that gives arbitrary answers.
            0..3 => {
                iotlb.access(page, |other| mapped ^ (other.get() & 1 == 0));
            }
            // Unmap, even if the page is not mapped.
            _ => iotlb.unmap(page),
        }
        for (held, limit) in iotlb
            .held()
            .into_iter()
            .zip([entries, buffered, config.history])
        {
            prop_assert!(held <= limit as usize);
        }
    }
    let stats = iotlb.stats();
    prop_assert!(stats.predicted <= stats.misses);
    Ok(())
}

proptest! {
    #![proptest_config(crate::cases(256, 0x5044_0002))]

    #[test]
    fn nothing_panics_and_memory_is_bounded(
        steps in prop::collection::vec((0..4_u8, page(), any::<bool>()), 0..200),
        history in size(),
        slots in any::<u8>(),
        sizes in (size(), size()),
        baseline in any::<bool>(),
    ) {
        let variant = if baseline { Variant::Baseline } else { Variant::Modified };
        let config = PrefetchConfig { variant, history, slots };
        drive::<Markov>(config, sizes.0, sizes.1, &steps)?;
        drive::<Recency>(config, sizes.0, sizes.1, &steps)?;
        drive::<Distance>(config, sizes.0, sizes.1, &steps)?;
    }

    #[test]
    fn a_pair_takes_any_entry(
        steps in prop::collection::vec((0..4_u8, page(), any::<bool>()), 0..200),
    ) {
        let mut pair = RingPair::new();
        for (kind, entry, valid) in steps {
            match kind {
                0..3 => {
                    pair.access(entry, |other| valid ^ (other & 1 == 0));
                }
                _ => pair.invalidate(),
            }
            let stats = pair.stats();
            let followed = stats.predicted + stats.mispredicted + stats.discarded;
            prop_assert!(followed <= stats.verification_walks - stats.rejected);
        }
    }
}

/// A long run over pages that never repeat, and the entries in use afterwards.
#[test]
fn a_stream_of_new_pages_fills_the_history_and_no_more() {
    fn left<P: Prefetcher>(variant: Variant) -> [usize; 3] {
        let mut iotlb = PrefetchingIotlb::<P>::new(PrefetchConfig::new(variant, 64), 16, 4);
        for n in 0..100_000_u64 {
            // Each step has a new width.
            let page = Pfn::new(n * n);
            iotlb.access(page, |_| true);
            iotlb.unmap(page);
        }
        iotlb.held()
    }
    use Variant::{Baseline, Modified};
    assert_eq!(left::<Markov>(Modified), [0, 0, 64]);
    assert_eq!(left::<Recency>(Modified), [0, 0, 64]);
    assert_eq!(left::<Distance>(Modified)[2], 64);
    assert_eq!(left::<Markov>(Baseline), [0, 0, 0]);
    assert_eq!(left::<Recency>(Baseline), [0, 0, 0]);
    assert_eq!(left::<Distance>(Baseline), [0, 0, 0]);
}
