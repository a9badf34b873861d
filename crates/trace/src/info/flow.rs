//! Tracks the mappings of one device in one direction.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::bursts::{Burst, OpenBursts};
use super::{Bursts, Flow, Histogram, bucket};

/// State of one flow during the read.
#[derive(Debug, Default)]
pub(super) struct FlowState {
    pub(super) flow: Flow,
    /// Mappings since `base`, oldest first; true if the mapping is live.
    pub(super) live: VecDeque<bool>,
    pub(super) base: u64,
    pub(super) last_ended: Option<u64>,
    pub(super) sizes: HashMap<u64, u64>,
    pub(super) open: OpenBursts,
    /// Number of ended bursts by length.
    pub(super) bursts: BTreeMap<u64, u64>,
}

impl FlowState {
    pub(super) fn close_burst(&mut self, cpu: u16) {
        let ended = self.open.map(cpu);
        self.count(ended);
    }

    fn count(&mut self, ended: Option<Burst>) {
        if let Some(burst) = ended {
            *self.bursts.entry(burst.unmaps).or_default() += 1;
        }
    }

    pub(super) fn unmap(&mut self, serial: u64, cpu: u16, now: u64) {
        self.flow.unmaps += 1;
        let index = serial.wrapping_sub(self.base) as usize;
        if index == 0 {
            self.flow.oldest_first += 1;
        }
        if let Some(alive) = self.live.get_mut(index) {
            *alive = false;
        }
        while self.live.front() == Some(&false) {
            self.live.pop_front();
            self.base += 1;
        }
        if self.last_ended.is_some_and(|last| last + 1 == serial) {
            self.flow.exact_next += 1;
        }
        self.last_ended = Some(serial);
        let ended = self.open.unmap(cpu, now);
        self.count(ended);
    }

    pub(super) fn finish(mut self) -> Flow {
        for burst in std::mem::take(&mut self.open).finish() {
            self.count(Some(burst));
        }
        let mut sizes: Vec<(u64, u64)> = self.sizes.into_iter().collect();
        sizes.sort_by_key(|&(size, count)| (std::cmp::Reverse(count), size));
        sizes.truncate(5);
        self.flow.sizes = sizes;
        let count: u64 = self.bursts.values().sum();
        let at = |percent: u64| {
            let mut left = (count * percent).div_ceil(100);
            let mut lengths = self.bursts.iter();
            let found = lengths.find(|&(_, &bursts)| {
                left = left.saturating_sub(bursts);
                left == 0
            });
            found.map(|(&length, _)| length)
        };
        let mut by_length = Histogram::default();
        for (length, bursts) in &self.bursts {
            by_length[bucket(*length)] += bursts;
        }
        self.flow.bursts = Bursts {
            by_length,
            count,
            unmaps: self
                .bursts
                .iter()
                .map(|(length, bursts)| length * bursts)
                .sum(),
            p50: at(50),
            p99: at(99),
            max: self.bursts.keys().next_back().copied(),
        };
        self.flow
    }
}
