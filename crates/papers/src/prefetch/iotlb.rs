//! An IOTLB with a prefetcher, a prefetch buffer and counters.

use alloc::vec::Vec;

use ringfence_types::Pfn;

use super::lru::Lru;
use super::{PrefetchConfig, Prefetcher, Variant};

/// Source of a translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LookupOutcome {
    /// The IOTLB, on a hit.
    Cached,
    /// The prefetch buffer, after an IOTLB miss.
    Predicted,
    /// A page walk that the access waited for.
    Walked,
    /// None: the page is not mapped.
    Faulted,
}

/// Counters of an IOTLB with a prefetcher.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefetchStats {
    /// Accesses that hit in the IOTLB.
    pub hits: u64,
    /// Accesses to mapped pages that missed in the IOTLB.
    pub misses: u64,
    /// Misses that hit in the prefetch buffer.
    pub predicted: u64,
    /// Wrong proposals: the entry was evicted unused, or the page was not mapped when it was
    /// fetched.
    pub mispredicted: u64,
    /// Prefetched entries that an invalidation removed before use.
    pub discarded: u64,
    /// Walks that verify a proposal and fetch the entry. Only [`Variant::Modified`] and rings use
    /// them.
    pub verification_walks: u64,
    /// Proposals dropped because the verification walk found the page not mapped.
    pub rejected: u64,
    /// Accesses to pages that are not mapped. They do not train the prefetcher.
    pub faults: u64,
}

impl PrefetchStats {
    /// Returns the share of misses that hit in the prefetch buffer; 0 without misses.
    pub fn hit_rate(&self) -> f64 {
        match self.misses {
            0 => 0.0,
            misses => self.predicted as f64 / misses as f64,
        }
    }
}

/// A fully associative IOTLB with LRU replacement, a prefetcher, and a prefetch buffer, also LRU.
///
/// It contains no page table. The caller of each access passes a function that models the walk: it
/// returns true if a page is mapped.
///
/// ```
/// use ringfence_papers::prefetch::{
///     LookupOutcome, Markov, PrefetchConfig, PrefetchingIotlb, Variant,
/// };
/// use ringfence_types::Pfn;
///
/// let config = PrefetchConfig::new(Variant::Modified, 8);
/// let mut iotlb = PrefetchingIotlb::<Markov>::new(config, 4, 4);
/// let mut served = LookupOutcome::Walked;
/// for page in [7, 3, 7, 3].map(Pfn::new) {
///     // Used once, then unmapped; the next time it is mapped again.
///     served = iotlb.access(page, |_| true);
///     iotlb.unmap(page);
/// }
/// assert_eq!(served, LookupOutcome::Predicted);
/// ```
#[derive(Debug, Clone)]
pub struct PrefetchingIotlb<P> {
    iotlb: Lru<()>,
    buffer: Lru<()>,
    prefetcher: P,
    proposals: Vec<Pfn>,
    stats: PrefetchStats,
}

impl<P: Prefetcher> PrefetchingIotlb<P> {
    /// Creates an empty IOTLB of `entries` entries and a buffer of `buffered` prefetched entries.
    /// Sizes above [`MAX_HISTORY`](super::MAX_HISTORY) are clamped.
    pub fn new(config: PrefetchConfig, entries: u32, buffered: u32) -> Self {
        Self {
            iotlb: Lru::new(entries),
            buffer: Lru::new(buffered),
            prefetcher: P::new(config),
            proposals: Vec::new(),
            stats: PrefetchStats::default(),
        }
    }

    /// Accesses `page`. `mapped` walks the table and returns true if a page is mapped.
    pub fn access(&mut self, page: Pfn, mut mapped: impl FnMut(Pfn) -> bool) -> LookupOutcome {
        if self.iotlb.touch(page.get()).is_some() {
            self.stats.hits += 1;
            return LookupOutcome::Cached;
        }
        let predicted = self.buffer.remove(page.get()).is_some();
        if !predicted && !mapped(page) {
            self.stats.faults += 1;
            return LookupOutcome::Faulted;
        }
        self.stats.misses += 1;
        let evicted = self.iotlb.insert(page.get(), ());
        self.proposals.clear();
        self.prefetcher.missed(page, &mut self.proposals);
        if let Some((old, ())) = evicted {
            self.prefetcher.evicted(Pfn::new(old));
        }
        self.follow(page, mapped);
        if predicted {
            self.stats.predicted += 1;
            LookupOutcome::Predicted
        } else {
            LookupOutcome::Walked
        }
    }

    /// Fetches the proposals that the miss of `page` produced.
    fn follow(&mut self, page: Pfn, mut mapped: impl FnMut(Pfn) -> bool) {
        let verifies = self.prefetcher.variant() == Variant::Modified;
        for &proposal in &self.proposals {
            let key = proposal.get();
            if proposal == page || self.iotlb.contains(key) || self.buffer.contains(key) {
                continue;
            }
            self.stats.verification_walks += u64::from(verifies);
            if !mapped(proposal) {
                match verifies {
                    true => self.stats.rejected += 1,
                    false => self.stats.mispredicted += 1,
                }
                continue;
            }
            if self.buffer.insert(key, ()).is_some() {
                self.stats.mispredicted += 1;
            }
        }
    }

    /// Reports that `page` was unmapped: invalidates its translation in the IOTLB and in the
    /// buffer.
    pub fn unmap(&mut self, page: Pfn) {
        let cached = self.iotlb.remove(page.get()).is_some();
        if self.buffer.remove(page.get()).is_some() {
            self.stats.discarded += 1;
        }
        self.prefetcher.unmapped(page, cached);
    }

    /// Returns the counters.
    pub const fn stats(&self) -> &PrefetchStats {
        &self.stats
    }

    /// Returns the number of entries in use: IOTLB, buffer, history.
    pub fn held(&self) -> [usize; 3] {
        [
            self.iotlb.len(),
            self.buffer.len(),
            self.prefetcher.entries(),
        ]
    }
}
