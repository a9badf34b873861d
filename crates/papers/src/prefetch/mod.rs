//! TLB prefetchers, and the rIOTLB's pair of entries for comparison (rIOMMU section 5.4).
//!
//! Three prefetchers from the literature learn from IOTLB misses and propose pages that may miss
//! next:
//!
//! | prefetcher | history | proposals |
//! |---|---|---|
//! | [`Markov`] | the pages that missed next after each page | those pages |
//! | [`Recency`] | a stack of evicted pages, the latest on top | its neighbours in the stack |
//! | [`Distance`] | the distances that followed each distance | the page plus those distances |
//!
//! [`PrefetchingIotlb`] combines one of them with a small IOTLB, a prefetch buffer and counters.
//! Each prefetcher exists in the two [`Variant`]s of rIOMMU section 5.4. [`RingPair`] is rIOMMU's
//! alternative. It needs no history, because the ring determines the next entry.
//!
//! G. Kandiraju and A. Sivasubramaniam survey the three in "Going the distance for TLB prefetching"
//! (ISCA 2002), the source that the rIOMMU paper cites. The rIOMMU paper leaves some details open.
//! This module chooses: histories are fully associative with LRU replacement; a hit in the buffer
//! still counts as an IOTLB miss and trains the prefetcher; a row is looked up before it is
//! updated.

mod distance;
mod iotlb;
mod lru;
mod markov;
mod recency;
mod ring_pair;
mod successors;

use alloc::vec::Vec;

use ringfence_types::Pfn;

pub use distance::Distance;
pub use iotlb::{LookupOutcome, PrefetchStats, PrefetchingIotlb};
pub use markov::Markov;
pub use recency::Recency;
pub use ring_pair::RingPair;

/// Maximum number of history entries: the number of 4 KiB pages in a 32-bit I/O address space.
pub const MAX_HISTORY: u32 = 1 << 20;

/// Maximum number of successors in a row.
pub const MAX_SLOTS: u8 = 4;

/// Treatment of unmapped pages in the history (rIOMMU section 5.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// As published for CPUs. An invalidation removes the page from the history. Proposals are
    /// fetched without verification; a proposal of an unmapped page counts as a misprediction.
    Baseline,
    /// As modified in the rIOMMU paper. An invalidated page stays in the history. The table is
    /// walked for each proposal, which is dropped unless the page is mapped.
    Modified,
}

impl Variant {
    /// Both variants, the published baseline first.
    pub const ALL: [Self; 2] = [Self::Baseline, Self::Modified];
}

/// Parameters of a prefetcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefetchConfig {
    /// Treatment of unmapped pages.
    pub variant: Variant,
    /// Number of history entries: rows of a table, or pages of a stack. 0 disables learning; values
    /// above [`MAX_HISTORY`] are clamped.
    pub history: u32,
    /// Number of successors kept per row, the latest ones; clamped to 1..=[`MAX_SLOTS`]. Ignored by
    /// a stack, which has no rows.
    pub slots: u8,
}

impl PrefetchConfig {
    /// Creates parameters with two slots per row, which gives as many proposals as the two
    /// neighbours in a stack.
    pub const fn new(variant: Variant, history: u32) -> Self {
        Self {
            variant,
            history,
            slots: 2,
        }
    }
}

/// A prefetcher of an IOTLB. The IOTLB reports its events; the prefetcher never reads a table.
pub trait Prefetcher {
    /// Creates a prefetcher with an empty history.
    fn new(config: PrefetchConfig) -> Self;

    /// Reports an IOTLB miss of `page`. Appends to `proposals` the pages expected to miss next,
    /// most likely first, at most [`MAX_SLOTS`]. They may already be cached or may not be mapped.
    fn missed(&mut self, page: Pfn, proposals: &mut Vec<Pfn>);

    /// Reports that the IOTLB evicted `page` to make room for another page.
    fn evicted(&mut self, page: Pfn);

    /// Reports that `page` was unmapped and invalidated. `cached` is true if the IOTLB held it.
    fn unmapped(&mut self, page: Pfn, cached: bool);

    /// Returns the variant.
    fn variant(&self) -> Variant;

    /// Returns the number of history entries in use, never more than configured.
    fn entries(&self) -> usize;
}
