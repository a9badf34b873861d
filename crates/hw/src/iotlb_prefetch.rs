//! Prefetches into the IOTLB (Amit, Ben-Yehuda and Yassour, "IOMMU: Strategies for Mitigating the
//! IOTLB Bottleneck", WIOSCA 2010; W11).
//!
//! The unit prefetches the pages next to a missed page, or software names mapped pages that a
//! device will access soon. A prefetched entry behaves like any other: an invalidation removes it,
//! and it can evict others. The unit does not cache a page that is not mapped.

use ringfence_pgtable::Format;
use ringfence_types::{Access, FaultReason, Iova, PageSize, PhysMemory};

use crate::walker::Walker;
use crate::{AdjacentPrefetch, PrefetchSide, TableRoot};

impl Walker {
    /// Prefetches the pages next to a missed one of `size` bytes. Each step moves by this size.
    #[cold]
    pub(crate) fn prefetch_adjacent<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        table: &TableRoot<F>,
        iova: Iova,
        size: PageSize,
        prefetch: AdjacentPrefetch,
    ) {
        let page = iova.get() >> size.shift();
        for step in 1..=u64::from(prefetch.pages) {
            let next = match prefetch.side {
                PrefetchSide::Higher => page.checked_add(step),
                PrefetchSide::Lower => page.checked_sub(step),
            };
            let Some(next) = next else {
                return;
            };
            let next = Iova::new(next.wrapping_shl(size.shift()));
            if !table.format.translates(next) {
                return;
            }
            self.prefetch_page(mem, table, next);
        }
    }

    /// Caches the page of `iova` unless it is cached or not mapped. Its walk counts as a prefetch.
    pub(crate) fn prefetch_page<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        table: &TableRoot<F>,
        iova: Iova,
    ) {
        if self.iotlb.lookup(table.domain, iova).is_some() {
            return;
        }
        let (stats, last_fault, adjacent) = (self.stats, self.last_fault(), self.adjacent.take());
        let mut found = self.page(mem, table, iova, Access::Read).is_ok();
        if !found && self.last_fault().1 == FaultReason::ReadDenied {
            found = self.page(mem, table, iova, Access::Write).is_ok();
        }
        let references = self
            .stats
            .walk_references
            .wrapping_sub(stats.walk_references);
        let evictions = self.stats.iotlb_evictions;
        self.stats = stats;
        self.stats.iotlb_evictions = evictions;
        self.stats.prefetch_references = stats.prefetch_references.wrapping_add(references);
        self.stats.prefetched = stats.prefetched.wrapping_add(u64::from(found));
        let _ = self.fault_at(last_fault.0, last_fault.1);
        self.adjacent = adjacent;
    }
}
