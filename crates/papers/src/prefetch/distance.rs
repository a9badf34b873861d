//! The Distance prefetcher: predicts the distances that followed this distance before (PF03, PF06).

use alloc::vec::Vec;

use ringfence_types::Pfn;

use super::lru::Lru;
use super::successors::Successors;
use super::{PrefetchConfig, Prefetcher, Variant};

/// A table with one row per distance between two successive misses. The row holds the distances
/// that followed.
///
/// G. Kandiraju and A. Sivasubramaniam, "Going the distance for TLB prefetching" (ISCA 2002). The
/// table holds no addresses that an invalidation could erase. The baseline instead forgets the page
/// from which it would measure the next distance.
#[derive(Debug, Clone)]
pub struct Distance {
    variant: Variant,
    slots: u8,
    /// Keyed by distance in pages, two's complement.
    rows: Lru<Successors>,
    last: Option<u64>,
    last_distance: Option<u64>,
}

/// Returns `page` plus `distance`; `None` if the result is outside the address space.
fn step(page: u64, distance: u64) -> Option<Pfn> {
    let there = page.checked_add_signed(distance as i64)?;
    (there <= Pfn::MAX.get()).then(|| Pfn::new(there))
}

impl Prefetcher for Distance {
    fn new(config: PrefetchConfig) -> Self {
        Self {
            variant: config.variant,
            slots: config.slots,
            rows: Lru::new(config.history),
            last: None,
            last_distance: None,
        }
    }

    fn missed(&mut self, page: Pfn, proposals: &mut Vec<Pfn>) {
        let page = page.get();
        let Some(last) = self.last.replace(page) else {
            return;
        };
        let distance = page.wrapping_sub(last);
        match self.rows.touch(distance) {
            Some(row) => proposals.extend(row.iter().filter_map(|next| step(page, next))),
            None => {
                self.rows.insert(distance, Successors::default());
            }
        }
        let before = self.last_distance.replace(distance);
        if let Some(row) = before.and_then(|before| self.rows.get_mut(before)) {
            row.note(distance, self.slots);
        }
    }

    fn evicted(&mut self, _page: Pfn) {}

    fn unmapped(&mut self, page: Pfn, _cached: bool) {
        if self.variant == Variant::Baseline && self.last == Some(page.get()) {
            self.last = None;
            self.last_distance = None;
        }
    }

    fn variant(&self) -> Variant {
        self.variant
    }

    fn entries(&self) -> usize {
        self.rows.len()
    }
}
