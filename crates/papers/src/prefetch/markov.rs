//! The Markov prefetcher: predicts the pages that missed after this page before (PF01, PF04).

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use ringfence_types::Pfn;

use super::lru::Lru;
use super::successors::Successors;
use super::{PrefetchConfig, Prefetcher, Variant};

/// A table with one row per page that missed. The row holds the pages that missed next.
///
/// D. Joseph and D. Grunwald, "Prefetching using Markov predictors" (ISCA 1997), applied to pages
/// instead of cache lines.
#[derive(Debug, Clone)]
pub struct Markov {
    variant: Variant,
    slots: u8,
    rows: Lru<Successors>,
    /// Reverse index: (page, row) if the row contains the page. The baseline uses it to erase an
    /// unmapped page. The modified variant leaves it empty.
    named: BTreeSet<(u64, u64)>,
    last: Option<u64>,
}

impl Markov {
    /// Removes the pages of `row`, the row of `page`, from the reverse index.
    fn unname(&mut self, page: u64, row: &Successors) {
        for successor in row.iter() {
            self.named.remove(&(successor, page));
        }
    }

    /// Records in the row of `last` that `page` missed next.
    fn learn(&mut self, last: u64, page: u64) {
        let Some(row) = self.rows.get_mut(last) else {
            return;
        };
        let lost = row.note(page, self.slots);
        if self.variant == Variant::Baseline {
            self.named.insert((page, last));
            if let Some(lost) = lost {
                self.named.remove(&(lost, last));
            }
        }
    }
}

impl Prefetcher for Markov {
    fn new(config: PrefetchConfig) -> Self {
        Self {
            variant: config.variant,
            slots: config.slots,
            rows: Lru::new(config.history),
            named: BTreeSet::new(),
            last: None,
        }
    }

    fn missed(&mut self, page: Pfn, proposals: &mut Vec<Pfn>) {
        let page = page.get();
        match self.rows.touch(page) {
            Some(row) => proposals.extend(row.iter().map(Pfn::new)),
            None => {
                if let Some((old, row)) = self.rows.insert(page, Successors::default()) {
                    self.unname(old, &row);
                }
            }
        }
        if let Some(last) = self.last.replace(page) {
            self.learn(last, page);
        }
    }

    fn evicted(&mut self, _page: Pfn) {}

    fn unmapped(&mut self, page: Pfn, _cached: bool) {
        if self.variant == Variant::Modified {
            return;
        }
        let page = page.get();
        if let Some(row) = self.rows.remove(page) {
            self.unname(page, &row);
        }
        while let Some(&(_, row)) = self.named.range((page, 0)..=(page, u64::MAX)).next() {
            self.named.remove(&(page, row));
            if let Some(row) = self.rows.get_mut(row) {
                row.forget(page);
            }
        }
        if self.last == Some(page) {
            self.last = None;
        }
    }

    fn variant(&self) -> Variant {
        self.variant
    }

    fn entries(&self) -> usize {
        self.rows.len()
    }
}
