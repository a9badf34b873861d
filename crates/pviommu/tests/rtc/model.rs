//! Brute-force model of a cache: each step visits every mapping.

use std::collections::BTreeMap;

use ringfence_pviommu::rtc::{Cycles, MappingKey, ResidencyPolicy, Retained, Retention};
use ringfence_types::Iova;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) giova: Iova,
    pub(crate) users: u64,
    /// Cycle of the last release.
    pub(crate) released: u64,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) mappings: BTreeMap<MappingKey, Mapping>,
    pub(crate) cycle: u64,
    cycles: u64,
    retention: Retention,
}

impl Model {
    /// Creates a model with the PVIOMMU paper's residency.
    pub(crate) fn new(cycles: Cycles) -> Self {
        Self::that_keeps(cycles, ResidencyPolicy::Fixed.into())
    }

    pub(crate) fn that_keeps(cycles: Cycles, retention: Retention) -> Self {
        Self {
            mappings: BTreeMap::new(),
            cycle: 0,
            cycles: u64::from(cycles.get()),
            retention,
        }
    }

    pub(crate) fn take(&mut self, key: MappingKey) -> Option<Iova> {
        let mapping = self.mappings.get_mut(&key)?;
        mapping.users += 1;
        Some(mapping.giova)
    }

    pub(crate) fn insert(&mut self, key: MappingKey, giova: Iova) -> bool {
        if self.mappings.contains_key(&key) {
            return false;
        }
        let mapping = Mapping {
            giova,
            users: 1,
            released: 0,
        };
        self.mappings.insert(key, mapping);
        true
    }

    pub(crate) fn release(&mut self, key: MappingKey) -> Option<Retained> {
        let released = self.released();
        let mapping = self.mappings.get_mut(&key)?;
        mapping.users = mapping.users.checked_sub(1)?;
        mapping.released = self.cycle;
        if mapping.users == 0 && released >= self.retention.released_max {
            self.mappings.remove(&key);
            return Some(Retained::Removed);
        }
        Some(Retained::Cached)
    }

    /// Ends a cycle; returns the mappings whose C cycles are over, in order of their keys.
    pub(crate) fn tick(&mut self) -> Vec<(MappingKey, Iova)> {
        self.cycle += 1;
        if self.retention.residency == ResidencyPolicy::UntilFull {
            return Vec::new();
        }
        let over =
            |mapping: &Mapping| mapping.users == 0 && self.cycle - mapping.released > self.cycles;
        let evicted = self.mappings.iter().filter(|(_, mapping)| over(mapping));
        let evicted: Vec<_> = evicted
            .map(|(key, mapping)| (*key, mapping.giova))
            .collect();
        for (key, _) in &evicted {
            self.mappings.remove(key);
        }
        evicted
    }

    pub(crate) fn pages(&self) -> u64 {
        self.mappings.keys().map(|key| key.pages()).sum()
    }

    pub(crate) fn released(&self) -> usize {
        let released = self.mappings.values().filter(|mapping| mapping.users == 0);
        released.count()
    }
}
