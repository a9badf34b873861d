//! The open bursts of a device: unmaps of a ring on a CPU that follow each other.

use std::collections::{BTreeMap, BTreeSet};

use ringfence_lab::plan::BURST_NS;

/// A ring and a CPU. They have at most one open burst.
type Key = (u16, u16);

/// The open bursts, each with its start time in nanoseconds.
#[derive(Debug, Default)]
pub(super) struct OpenBursts {
    since: BTreeMap<Key, u64>,
    by_time: BTreeSet<(u64, Key)>,
}

impl OpenBursts {
    /// Begins a burst if none is open. Returns true if it began.
    pub(super) fn begin(&mut self, ring: u16, cpu: u16, now: u64) -> bool {
        let key = (ring, cpu);
        let new = !self.since.contains_key(&key);
        if new {
            self.since.insert(key, now);
            self.by_time.insert((now, key));
        }
        new
    }

    /// Ends the burst of a ring on a CPU. Returns true if it was open.
    pub(super) fn end(&mut self, ring: u16, cpu: u16) -> bool {
        let key = (ring, cpu);
        let since = self.since.remove(&key);
        since.is_some_and(|since| self.by_time.remove(&(since, key)))
    }

    /// Ends the oldest burst if it is over at `now`, and returns its ring.
    pub(super) fn end_oldest(&mut self, now: u64) -> Option<u16> {
        let (since, key) = self.by_time.first().copied()?;
        if now < since.saturating_add(BURST_NS) {
            return None;
        }
        self.by_time.pop_first();
        self.since.remove(&key);
        Some(key.0)
    }
}
