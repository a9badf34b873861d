//! Tracks the mappings of one device in one direction.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::{Bursts, Flow};

/// Longest gap in ns within a burst of unmaps, as in the replay.
const BURST_GAP_NS: u64 = 50_000;

/// State of one flow during the read.
#[derive(Debug, Default)]
pub(super) struct FlowState {
    pub(super) flow: Flow,
    /// Mappings since `base`, oldest first; true if the mapping is live.
    pub(super) live: VecDeque<bool>,
    pub(super) base: u64,
    pub(super) last_ended: Option<u64>,
    pub(super) sizes: HashMap<u64, u64>,
    /// Open bursts by CPU: time of the last unmap and length so far.
    pub(super) open: HashMap<u16, (u64, u64)>,
    pub(super) bursts: BTreeMap<u64, u64>,
}

impl FlowState {
    pub(super) fn close_burst(&mut self, cpu: u16) {
        if let Some((_, length)) = self.open.remove(&cpu) {
            *self.bursts.entry(length).or_default() += 1;
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
        let length = match self.open.get(&cpu) {
            Some(&(last, length)) if now.saturating_sub(last) <= BURST_GAP_NS => length + 1,
            _ => {
                self.close_burst(cpu);
                1
            }
        };
        self.open.insert(cpu, (now, length));
    }

    pub(super) fn finish(mut self) -> Flow {
        let cpus: Vec<u16> = self.open.keys().copied().collect();
        for cpu in cpus {
            self.close_burst(cpu);
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
        self.flow.bursts = Bursts {
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
