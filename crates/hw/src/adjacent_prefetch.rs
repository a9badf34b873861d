//! The choice of pages next to a missed one; `iotlb_prefetch.rs` reads them.

/// Side of a missed page on which the unit prefetches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefetchSide {
    /// Addresses above the missed page.
    Higher,
    /// Lower addresses. Allocators that search from the top return these next.
    Lower,
}

/// Prefetch of pages next to a missed page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AdjacentPrefetch {
    /// Side of the missed page.
    pub side: PrefetchSide,
    /// Number of pages.
    pub pages: u8,
}
