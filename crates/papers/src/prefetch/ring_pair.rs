//! The rIOTLB's two entries per ring, modelled as a prefetcher (rIOMMU section 4, Fig. 10).

use super::iotlb::{LookupOutcome, PrefetchStats};

/// The current entry of a ring and its successor.
///
/// This models only the prediction, so that traces of any device can be compared with the
/// prefetchers. Entries are numbered in map order, and the ring is long enough that no number
/// repeats. It implements the fixed algorithm: an access to any other entry prefetches again and
/// drops the old `next`.
#[derive(Debug, Clone, Default)]
pub struct RingPair {
    current: Option<u64>,
    next: Option<u64>,
    stats: PrefetchStats,
}

impl RingPair {
    /// Creates a pair with no cached entry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Accesses `entry`. `valid` reads an entry of the ring's table.
    pub fn access(&mut self, entry: u64, mut valid: impl FnMut(u64) -> bool) -> LookupOutcome {
        if self.current == Some(entry) {
            self.stats.hits += 1;
            return LookupOutcome::Cached;
        }
        // riotlb_entry_sync
        let predicted = self.next == Some(entry);
        if !predicted && !valid(entry) {
            // rtable_walk failed: keep the cached entries.
            self.stats.faults += 1;
            return LookupOutcome::Faulted;
        }
        if !predicted && self.next.is_some() {
            self.stats.mispredicted += 1;
        }
        self.stats.misses += 1;
        self.current = Some(entry);
        // rprefetch
        self.next = entry.checked_add(1);
        if let Some(next) = self.next {
            self.stats.verification_walks += 1;
            if !valid(next) {
                self.stats.rejected += 1;
                self.next = None;
            }
        }
        if predicted {
            self.stats.predicted += 1;
            LookupOutcome::Predicted
        } else {
            LookupOutcome::Walked
        }
    }

    /// Invalidates the ring, as the driver does at the end of each burst of unmaps.
    pub fn invalidate(&mut self) {
        self.current = None;
        if self.next.take().is_some() {
            self.stats.discarded += 1;
        }
    }

    /// Returns the counters.
    pub const fn stats(&self) -> &PrefetchStats {
        &self.stats
    }
}
