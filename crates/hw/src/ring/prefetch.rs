//! `rprefetch` (rIOMMU Fig. 10; RI09): a copy of the slot after the current one.

use alloc::collections::VecDeque;

use ringfence_pgtable::RingPte;
use ringfence_types::{PhysMemory, RingSlot};

use super::logic::{NoSuccessorPolicy, RingLogic};
use super::riotlb::{Entry, RingKey};
use super::stats::{RingStats, count};
use super::unit::{RingUnit, RingUnitState};

/// When the next slot is read. "Our design does not depend on the latter field and works just as
/// well without it" (section 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Prefetch {
    /// Before the access that moved to the current slot completes.
    Immediate,
    /// When the embedder says ([`RingUnit::complete_prefetch`]): "prefetching can be asynchronous".
    Deferred,
    /// Never.
    Absent,
}

/// Prefetches put off, oldest first: which ring, and which slot was its current one then.
#[derive(Debug, Clone)]
pub(super) struct DeferredPrefetches {
    queue: VecDeque<(RingKey, RingSlot)>,
    capacity: usize,
}

impl DeferredPrefetches {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            queue: VecDeque::with_capacity(capacity),
            capacity,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// A prefetch is a hint: without room it does not take place.
    fn push(&mut self, key: RingKey, current: RingSlot, stats: &mut RingStats) {
        if self.queue.len() < self.capacity {
            self.queue.push_back((key, current));
        } else {
            count(&mut stats.prefetches_dropped);
        }
    }
}

impl RingUnitState {
    /// Reads the slot after the current one of `entry`, now, later, or not. Until then a repaired
    /// entry has no next, whatever it had for the slot before.
    #[inline]
    pub(super) fn prefetch<L: RingLogic, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        key: RingKey,
        entry: &mut Entry,
    ) {
        match self.when {
            Prefetch::Immediate => self.fetch_next::<L, M>(mem, entry),
            Prefetch::Deferred => {
                no_successor::<L>(entry);
                self.waiting.push(key, entry.slot(), &mut self.stats);
            }
            Prefetch::Absent => no_successor::<L>(entry),
        }
    }

    #[inline]
    fn fetch_next<L: RingLogic, M: PhysMemory + ?Sized>(&mut self, mem: &M, entry: &mut Entry) {
        // if( r.size > 1 && r.ring[next].valid ) e.next = r.ring[next];
        if entry.table.slots() > 1
            && let Ok(next) = RingPte::find(mem, &entry.table, entry.successor())
        {
            entry.set_next(next);
            count(&mut self.stats.prefetches);
        } else {
            no_successor::<L>(entry);
        }
    }
}

#[inline]
fn no_successor<L: RingLogic>(entry: &mut Entry) {
    if L::NO_SUCCESSOR == NoSuccessorPolicy::Clears {
        entry.set_next(RingPte::ABSENT);
    }
}

impl<L: RingLogic> RingUnit<L> {
    /// Completes the oldest prefetch put off; whether there was one. It reads memory as it is now.
    /// If its ring has lost its entry or moved to another slot meanwhile, it comes to nothing.
    pub fn complete_prefetch<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> bool {
        let Some((key, current)) = self.state.waiting.queue.pop_front() else {
            return false;
        };
        // A prefetch is no use of the ring: the order of replacement stays.
        if let Some(entry) = self.riotlb.peek(key)
            && entry.slot() == current
        {
            self.state.fetch_next::<L, M>(mem, entry);
        }
        true
    }

    /// Prefetches put off and not completed.
    pub fn prefetches_waiting(&self) -> usize {
        self.state.waiting.len()
    }
}
