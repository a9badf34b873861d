//! Prefetches into the IOTLB, two strategies against its misses (Amit, Ben-Yehuda and Yassour,
//! "IOMMU: Strategies for Mitigating the IOTLB Bottleneck", WIOSCA 2010; W11).
//!
//! The unit prefetches pages next to a missed one, or software names pages that it has mapped and
//! that a device will access soon. A prefetched entry is an entry like any other: an invalidation
//! removes it, and it can evict others. A page that is not mapped is not cached.

use ringfence_pgtable::Format;
use ringfence_types::{
    Access, FaultReason, Iova, PageSize, Pfn, PfnRange, PhysMemory, RequesterId,
};

use crate::walker::Walker;
use crate::{ContextLookup, Iommu, TableRoot};

/// Side of a missed page on which the unit prefetches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefetchSide {
    /// Higher addresses.
    Higher,
    /// Lower addresses. Allocators that search from the top return these next.
    Lower,
}

/// Prefetch of pages next to a missed page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AdjacentPrefetch {
    /// The side.
    pub side: PrefetchSide,
    /// Number of pages.
    pub pages: u8,
}

impl<D: ContextLookup> Iommu<D> {
    /// Sets the prefetch at each miss; `None` turns it off, which is the default.
    pub fn set_adjacent_prefetch(&mut self, prefetch: Option<AdjacentPrefetch>) {
        self.walker.adjacent = prefetch;
    }

    /// Prefetches the translations of `range` for `device`, as a hint by the software that has
    /// mapped it. Reads at most [`MAX_HINT`](Self::MAX_HINT) pages. Ignores a device without a table.
    pub fn prefetch<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        range: &PfnRange,
    ) {
        let Ok(context) = self.context(mem, device) else {
            return;
        };
        let Some(table) = context.table_root() else {
            return;
        };
        let first = range.lo().get();
        let last = range
            .hi()
            .get()
            .min(first.saturating_add(Self::MAX_HINT - 1));
        for page in first..=last {
            let iova = Pfn::new(page).iova();
            if iova <= context.highest {
                self.walker.prefetch_page(mem, table, iova);
            }
        }
    }

    /// Maximum number of pages of one hint.
    pub const MAX_HINT: u64 = 512;
}

impl Walker {
    /// Prefetches the pages next to a missed one.
    #[cold]
    pub(crate) fn prefetch_adjacent<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        table: &TableRoot<F>,
        iova: Iova,
        prefetch: AdjacentPrefetch,
    ) {
        let page = iova.get() >> PageSize::Size4K.shift();
        let width = table.format.width();
        for step in 1..=u64::from(prefetch.pages) {
            let next = match prefetch.side {
                PrefetchSide::Higher => page.checked_add(step),
                PrefetchSide::Lower => page.checked_sub(step),
            };
            let Some(next) = next else {
                return;
            };
            let next = Pfn::new(next).iova();
            if next.get() >> width != 0 {
                return;
            }
            self.prefetch_page(mem, table, next);
        }
    }

    /// Caches the page of `iova` unless it is cached or not mapped. Its walk counts as a prefetch.
    fn prefetch_page<F: Format, M: PhysMemory + ?Sized>(
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
