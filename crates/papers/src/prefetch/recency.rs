//! The Recency prefetcher: pages evicted together are needed together (PF02, PF05).

use alloc::vec::Vec;

use ringfence_types::Pfn;

use super::lru::Lru;
use super::{PrefetchConfig, Prefetcher, Variant};

/// A stack of pages evicted from the IOTLB, the latest on top. A miss removes the page from the
/// stack and proposes its two neighbours.
///
/// A. Saulsbury, F. Dahlgren and P. Stenström, "Recency-based TLB preloading" (ISCA 2000). There
/// the stack consists of pointers in the page table and holds every page. Here it has a fixed size,
/// like the other two histories, and drops its lowest page. The modified variant treats an
/// invalidation as an eviction.
#[derive(Debug, Clone)]
pub struct Recency {
    variant: Variant,
    stack: Lru<()>,
}

impl Prefetcher for Recency {
    fn new(config: PrefetchConfig) -> Self {
        Self {
            variant: config.variant,
            stack: Lru::new(config.history),
        }
    }

    fn missed(&mut self, page: Pfn, proposals: &mut Vec<Pfn>) {
        let neighbours = self.stack.neighbours(page.get());
        proposals.extend(neighbours.into_iter().flatten().map(Pfn::new));
        self.stack.remove(page.get());
    }

    fn evicted(&mut self, page: Pfn) {
        self.stack.insert(page.get(), ());
    }

    fn unmapped(&mut self, page: Pfn, cached: bool) {
        match self.variant {
            Variant::Baseline => {
                self.stack.remove(page.get());
            }
            Variant::Modified if cached => self.evicted(page),
            Variant::Modified => {}
        }
    }

    fn variant(&self) -> Variant {
        self.variant
    }

    fn entries(&self) -> usize {
        self.stack.len()
    }
}
