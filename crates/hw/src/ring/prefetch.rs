//! `rprefetch` (rIOMMU Fig. 10): copies the slot after the current one.

use alloc::collections::VecDeque;

use ringfence_pgtable::RingPte;
use ringfence_types::{PhysMemory, RingSlot};

use super::logic::RingLogic;
use super::riotlb::{Entry, RingKey};
use super::stats::{RingStats, count};
use super::unit::{RingUnit, RingUnitState};

/// Time at which the unit reads the next slot. "Our design does not depend on the latter field and
/// works just as well without it" (section 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Prefetch {
    /// Before the access that moved to the current slot completes.
    Immediate,
    /// When the embedder calls [`RingUnit::complete_prefetch`]: "prefetching can be asynchronous".
    Deferred,
    /// Never: the unit reads a slot only when an access moves to it.
    Absent,
}

/// Queue of deferred prefetches, oldest first: the ring, and its current slot at that time.
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

    /// Queues a prefetch. If the queue is full, drops the oldest one: a prefetch is only a hint.
    ///
    /// Fig. 10 calls `rprefetch` with the current state of the entry. A later call for the ring
    /// makes an earlier one useless, so the oldest prefetch is the least likely to help.
    fn push(&mut self, key: RingKey, current: RingSlot, stats: &mut RingStats) {
        if self.queue.len() >= self.capacity {
            count(&mut stats.prefetches_dropped);
            if self.queue.pop_front().is_none() {
                return;
            }
        }
        self.queue.push_back((key, current));
    }
}

impl RingUnitState {
    /// Reads the slot after the current one of `entry` now, later, or never. Until then, fixed
    /// logic leaves the entry without `next`.
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
    if L::CLEARS_NEXT {
        entry.set_next(RingPte::ABSENT);
    }
}

impl<L: RingLogic> RingUnit<L> {
    /// Completes the oldest deferred prefetch; returns false if there is none. Reads the current
    /// memory contents. Ignores the prefetch if its ring has lost its entry or moved to another
    /// slot.
    pub fn complete_prefetch<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> bool {
        let Some((key, current)) = self.state.waiting.queue.pop_front() else {
            return false;
        };
        // A prefetch does not count as a use of the ring: keep the replacement order.
        if let Some(entry) = self.riotlb.peek(key)
            && entry.slot() == current
        {
            self.state.fetch_next::<L, M>(mem, entry);
        }
        true
    }

    /// Returns the number of deferred prefetches.
    pub fn prefetches_waiting(&self) -> usize {
        self.state.waiting.len()
    }
}
