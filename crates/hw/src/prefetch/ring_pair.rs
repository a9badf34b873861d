//! The rIOTLB's two entries for a ring, as a prefetcher among prefetchers (rIOMMU section 4, Fig.
//! 10).

use super::iotlb::{LookupOutcome, PrefetchStats};

/// The current entry of a ring and the one after it.
///
/// This is the prediction alone, to be counted like the prefetchers' in traces of any device:
/// entries are numbered as they are mapped and the ring is so long that no number comes twice. It
/// follows the repaired algorithm: an access that finds the ring elsewhere prefetches anew and
/// keeps no older `next`.
#[derive(Debug, Clone, Default)]
pub struct RingPair {
    current: Option<u64>,
    next: Option<u64>,
    stats: PrefetchStats,
}

impl RingPair {
    /// Nothing cached yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The device accesses `entry`; `valid` reads an entry of the ring's table.
    pub fn access(&mut self, entry: u64, mut valid: impl FnMut(u64) -> bool) -> LookupOutcome {
        if self.current == Some(entry) {
            self.stats.hits += 1;
            return LookupOutcome::Cached;
        }
        // riotlb_entry_sync
        let predicted = self.next == Some(entry);
        if !predicted && !valid(entry) {
            // rtable_walk failed: what is cached stays.
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

    /// The ring is invalidated, as at the end of each burst of unmaps.
    pub fn invalidate(&mut self) {
        self.current = None;
        if self.next.take().is_some() {
            self.stats.discarded += 1;
        }
    }

    /// What happened so far.
    pub const fn stats(&self) -> &PrefetchStats {
        &self.stats
    }
}
