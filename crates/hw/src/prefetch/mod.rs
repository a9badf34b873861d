//! TLB prefetchers, and the rIOTLB's pair of entries to compare them with (rIOMMU section 5.4).
//!
//! Three prefetchers of the literature learn from the pages that miss the IOTLB and propose pages
//! that may miss next:
//!
//! | prefetcher | its history | proposes |
//! |---|---|---|
//! | [`Markov`] | which pages missed next after a page | those pages |
//! | [`Recency`] | a stack of the pages that left the IOTLB, the latest on top | the page's neighbours in the stack |
//! | [`Distance`] | which distances came next after a distance | the page plus those distances |
//!
//! [`PrefetchingIotlb`] puts one of them beside a small IOTLB, with a buffer for what was proposed,
//! and counts. Each exists in the two [`Variant`]s of the document. [`RingPair`] is what rIOMMU
//! does instead: it needs no history, because a ring says what comes next.
//!
//! The three are those that G. Kandiraju and A. Sivasubramaniam survey in "Going the distance for
//! TLB prefetching" (ISCA 2002), the rIOMMU document's own source. What the document leaves open is
//! settled here: histories are fully associative with LRU replacement, a hit in the buffer is still
//! a miss of the IOTLB and trains the prefetcher, and a row is looked up before it is changed.

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

/// Most entries a history may have: as many as there are 4 KiB pages in a 32-bit I/O address space.
pub const MAX_HISTORY: u32 = 1 << 20;

/// Most successors that a row remembers.
pub const MAX_SLOTS: u8 = 4;

/// What becomes of a page in the history when it is unmapped (rIOMMU section 5.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// As published for processors: an invalidated page is forgotten. What is proposed is fetched
    /// unseen; if it turns out to be not mapped, the proposal was wrong.
    Baseline,
    /// As the rIOMMU document modified them: an invalidated page stays in the history, and the
    /// table is walked for each proposal, which is made only if the page is mapped.
    Modified,
}

impl Variant {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Baseline, Self::Modified];
}

/// Size and behaviour of a prefetcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefetchConfig {
    /// What becomes of unmapped pages.
    pub variant: Variant,
    /// Entries of the history: rows of a table, pages of a stack. 0 learns nothing; more than
    /// [`MAX_HISTORY`] count as that many.
    pub history: u32,
    /// Successors that a row remembers, the latest ones; cut to 1..=[`MAX_SLOTS`]. A stack has no
    /// rows and ignores it.
    pub slots: u8,
}

impl PrefetchConfig {
    /// Two slots to a row: as many proposals as the two neighbours in a stack.
    pub const fn new(variant: Variant, history: u32) -> Self {
        Self {
            variant,
            history,
            slots: 2,
        }
    }
}

/// The role of a prefetcher beside an IOTLB. It is told what happens there, and never sees a table.
pub trait Prefetcher {
    /// An empty history.
    fn new(config: PrefetchConfig) -> Self;

    /// `page` was looked up in the IOTLB and not found. Appends to `proposals` the pages expected
    /// to miss next, the likeliest first, at most [`MAX_SLOTS`]; they may be cached already, or not
    /// be mapped.
    fn missed(&mut self, page: Pfn, proposals: &mut Vec<Pfn>);

    /// `page` left the IOTLB to make room for another one.
    fn evicted(&mut self, page: Pfn);

    /// `page` was unmapped and invalidated; `cached` says whether it was in the IOTLB until then.
    fn unmapped(&mut self, page: Pfn, cached: bool);

    /// Which variant this is.
    fn variant(&self) -> Variant;

    /// Entries of the history in use; never more than asked for.
    fn entries(&self) -> usize;
}
