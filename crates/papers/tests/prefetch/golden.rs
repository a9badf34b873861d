//! Small sequences computed by hand: the pages that each prefetcher proposes at each miss.

use ringfence_papers::prefetch::{Distance, Markov, PrefetchConfig, Prefetcher, Recency, Variant};
use ringfence_types::Pfn;

/// An event reported to the prefetcher.
enum Step {
    /// A page misses; the prefetcher must propose these pages.
    Miss(u64, &'static [u64]),
    /// The IOTLB evicts a page.
    Evict(u64),
    /// A cached page is unmapped.
    Unmap(u64),
    /// A page that was never used is unmapped.
    UnmapUnused(u64),
}
use Step::{Evict, Miss, Unmap, UnmapUnused};

fn check<P: Prefetcher>(name: &str, variant: Variant, history: u32, steps: &[Step]) {
    let mut prefetcher = P::new(PrefetchConfig::new(variant, history));
    let mut proposals = Vec::new();
    for (at, step) in steps.iter().enumerate() {
        match *step {
            Miss(page, expected) => {
                proposals.clear();
                prefetcher.missed(Pfn::new(page), &mut proposals);
                let found: Vec<u64> = proposals.iter().map(|page| page.get()).collect();
                assert_eq!(found, expected, "{name}: step {at}, miss of {page}");
            }
            Evict(page) => prefetcher.evicted(Pfn::new(page)),
            Unmap(page) => prefetcher.unmapped(Pfn::new(page), true),
            UnmapUnused(page) => prefetcher.unmapped(Pfn::new(page), false),
        }
    }
}

#[test]
fn markov_predicts_the_successor() {
    use Variant::{Baseline, Modified};
    let live: &[Step] = &[
        Miss(1, &[]),
        Miss(2, &[]),
        Miss(3, &[]),
        Miss(1, &[2]),
        Miss(4, &[]),
        // 2 and 4 missed after 1, 4 last.
        Miss(1, &[4, 2]),
        Miss(3, &[1]),
        // The row keeps only two: 3 and 4.
        Miss(1, &[3, 4]),
        Miss(4, &[1]),
        Miss(1, &[4, 3]),
    ];
    for variant in Variant::ALL {
        check::<Markov>("nothing is unmapped", variant, 8, live);
    }
    let single_use: &[Step] = &[
        Miss(1, &[]),
        Unmap(1),
        Miss(2, &[]),
        Unmap(2),
        Miss(1, &[2]),
        Unmap(1),
        Miss(2, &[1]),
    ];
    check::<Markov>("unmapped pages are kept", Modified, 2, single_use);
    check::<Markov>(
        "rows of one page are of no use",
        Modified,
        1,
        &[
            Miss(1, &[]),
            Miss(2, &[]),
            Miss(1, &[]),
            Miss(2, &[]),
            // Only the row of 2 remains, and 2 missed after 2.
            Miss(2, &[]),
            Miss(2, &[2]),
        ],
    );
    check::<Markov>(
        "unmapped pages are forgotten as rows, as successors, and as the last miss",
        Baseline,
        8,
        &[
            Miss(1, &[]),
            Miss(2, &[]),
            Miss(3, &[]),
            Unmap(2),
            // 2 missed after 1, but was removed.
            Miss(1, &[]),
            // The row of 2 was removed, and with it that 3 missed after 2.
            Miss(2, &[]),
            Unmap(2),
            // No page precedes 4: 2 was removed.
            Miss(4, &[]),
            // 1 missed after 3. 2 missed after 1, but was removed again.
            Miss(3, &[1]),
            Miss(1, &[]),
            UnmapUnused(4),
        ],
    );
}

#[test]
fn recency_proposes_the_neighbours_in_the_stack() {
    use Variant::{Baseline, Modified};
    let evicted: &[Step] = &[
        Miss(1, &[]),
        Evict(1),
        Miss(2, &[]),
        Evict(2),
        Miss(3, &[]),
        Evict(3),
        // The stack is 3 2 1.
        Miss(2, &[3, 1]),
        // 2 was removed; the stack is 3 1.
        Miss(3, &[1]),
        Evict(2),
        Evict(3),
        // The stack is 3 2 1.
        Miss(1, &[2]),
        Miss(4, &[]),
    ];
    for variant in Variant::ALL {
        check::<Recency>("nothing is unmapped", variant, 8, evicted);
    }
    let single_use: &[Step] = &[
        Miss(1, &[]),
        Unmap(1),
        Miss(2, &[]),
        Unmap(2),
        // Never used, so never evicted from the IOTLB.
        UnmapUnused(9),
        Miss(3, &[]),
        Unmap(3),
        Miss(1, &[2]),
        Unmap(1),
        // The stack is 1 3 2.
        Miss(3, &[1, 2]),
    ];
    check::<Recency>("unmapped pages are kept", Modified, 8, single_use);
    check::<Recency>(
        "the lowest page drops out",
        Modified,
        2,
        &[
            Miss(1, &[]),
            Unmap(1),
            Miss(2, &[]),
            Unmap(2),
            Miss(3, &[]),
            Unmap(3),
            Miss(1, &[]),
            Unmap(1),
            // The stack is 1 3.
            Miss(3, &[1]),
        ],
    );
    check::<Recency>(
        "unmapped pages are forgotten and their neighbours close up",
        Baseline,
        8,
        &[
            Evict(1),
            Evict(2),
            Evict(3),
            UnmapUnused(2),
            Miss(1, &[3]),
            Unmap(1),
            Miss(3, &[]),
        ],
    );
}

#[test]
fn distance_predicts_the_following_steps() {
    use Variant::{Baseline, Modified};
    let live: &[Step] = &[
        Miss(10, &[]),
        Miss(11, &[]),
        Miss(13, &[]),
        // 2 followed 1.
        Miss(14, &[16]),
        // 1 followed 2.
        Miss(16, &[17]),
        Miss(10, &[]),
        Miss(11, &[13]),
        // 1 and -6 followed 2.
        Miss(13, &[7, 14]),
    ];
    for variant in Variant::ALL {
        check::<Distance>("nothing is unmapped", variant, 8, live);
    }
    let single_use: &[Step] = &[
        Miss(10, &[]),
        Unmap(10),
        Miss(9, &[]),
        Unmap(9),
        Miss(8, &[]),
        Unmap(8),
        Miss(7, &[6]),
    ];
    check::<Distance>("unmapped pages are kept", Modified, 1, single_use);
    check::<Distance>(
        "without the page before there is no distance",
        Baseline,
        8,
        &[
            Miss(10, &[]),
            Unmap(10),
            Miss(9, &[]),
            Unmap(9),
            Miss(8, &[]),
            Miss(7, &[]),
            Miss(6, &[]),
            Miss(5, &[4]),
            Unmap(5),
            Miss(4, &[]),
            Miss(3, &[2]),
        ],
    );
    let end = Pfn::MAX.get();
    check::<Distance>(
        "no page lies outside of the address space",
        Modified,
        8,
        &[
            Miss(3, &[]),
            Miss(2, &[]),
            Miss(1, &[]),
            Miss(0, &[]),
            Miss(end - 3, &[]),
            Miss(end - 2, &[]),
            Miss(end - 1, &[]),
            Miss(end, &[]),
        ],
    );
}
