//! The scope of the invalidation that releases a batch.

use ringfence_dma::flush::RangeBatch;
use ringfence_dma::space::ClearedRange;
use ringfence_types::{Batch, CachedLevels, DomainId, Invalidation, Pfn, PfnRange, Unmapped};

fn pages(first: u64, count: u64) -> PfnRange {
    PfnRange::new(Pfn::new(first), count).unwrap()
}

/// A batch from which a table page was unlinked is not released while walk caches may refer to that
/// page.
#[test]
fn a_batch_is_covered_only_with_its_levels() {
    use CachedLevels::{All, Leaves};
    let domain = DomainId::new(3);
    let request = |levels| Invalidation::Pages {
        domain,
        range: pages(16, 16),
        levels,
    };
    for (taken, asked, covered) in [
        ([Leaves, Leaves], Leaves, true),
        ([Leaves, All], Leaves, false),
        ([All, Leaves], Leaves, false),
        ([Leaves, All], All, true),
    ] {
        let mut batch = RangeBatch::with_capacity(2);
        for (levels, range) in taken.into_iter().zip([pages(16, 4), pages(28, 4)]) {
            let unmapped = Unmapped::attest_cleared(domain, range);
            batch.push(ClearedRange {
                unmapped,
                levels,
                tables: (),
            });
        }
        let case = format!("{taken:?} by {asked:?}");
        assert_eq!(batch.covered_by(&request(asked)), covered, "{case}");
        // A batch that absorbed this one needs the same scope.
        let mut other = RangeBatch::with_capacity(0);
        other.append(&mut batch);
        assert_eq!(
            other.covered_by(&request(asked)),
            covered,
            "{case}, appended"
        );
        assert!(other.covered_by(&Invalidation::Domain(domain)));
    }
}
