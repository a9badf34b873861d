//! The slots of one ring: which are free, which wait for the end of their burst, and which the next
//! maps take.
//!
//! A slot goes round: *free*, *live* from map to unmap, *withheld* from unmap to the end of its
//! burst, free. Fig. 11 knows two of the three: it counts mappings and trusts the tail. Which slots
//! are live is what their entries say, so it is not kept here.

use core::ops::Range;

use ringfence_types::{RingId, RingSlot};

use super::error::{FullReason, RingFull};
use super::free::FreeSlots;

/// Which slot a map takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotChoice {
    /// The one at the tail, as in Fig. 11; if that is not free, the map waits for it.
    Tail,
    /// The first free one from the tail on, round the ring. For drivers that unmap in another order
    /// than they map.
    NextFree,
}

/// Maps that a ring has put off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stalls {
    /// The slot was live.
    pub unmap: u64,
    /// The slot waited for the end of its burst.
    pub burst_end: u64,
}

/// A ring's slots, but for those that whoever maps has set aside.
#[derive(Debug)]
pub(super) struct Slots {
    choice: SlotChoice,
    /// N.
    count: u32,
    /// Slots that are neither mapped, nor withheld, nor set aside.
    free: FreeSlots,
    /// Slots that are neither free nor live.
    withheld: u32,
    stalls: Stalls,
}

impl Slots {
    /// `count` slots, all free.
    pub(super) fn all(count: u32, choice: SlotChoice) -> Self {
        Self {
            choice,
            count,
            free: FreeSlots::all(count),
            withheld: 0,
            stalls: Stalls::default(),
        }
    }

    /// N.
    #[inline]
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// How many are free.
    #[inline]
    pub(super) fn free(&self) -> u32 {
        self.free.count()
    }

    /// How many are unmapped and wait for the end of their burst.
    #[inline]
    pub(super) fn withheld(&self) -> u32 {
        self.withheld
    }

    /// Maps put off so far.
    #[inline]
    pub(super) fn stalls(&self) -> Stalls {
        self.stalls
    }

    /// Sets aside the slots that the next maps take if the ring is at `tail`: one at least and 64
    /// at most, none past its end. `None`: it is full.
    pub(super) fn reserve(&mut self, tail: u32) -> Option<Range<u32>> {
        let first = match self.choice {
            SlotChoice::Tail => tail,
            SlotChoice::NextFree => self.free.next(tail).unwrap_or(tail),
        };
        let run = self.free.take_run(first);
        (run > 0).then_some(first..first + run)
    }

    /// The first slot in the way of `pieces` maps at `tail`, if `ready` slots are set aside.
    pub(super) fn first_busy(&self, tail: u32, ready: u32, pieces: u32) -> Option<u32> {
        match self.choice {
            SlotChoice::NextFree => (self.free() + ready < pieces).then_some(tail),
            SlotChoice::Tail => (tail..self.count)
                .chain(0..tail)
                .take(pieces as usize)
                .skip(ready as usize)
                .find(|slot| !self.free.contains(*slot)),
        }
    }

    /// The refusal of a map in `ring` that found `slot` in its way or, if it would take any, no
    /// other. Slots of `ready` are set aside; `is_live` says which are mapped.
    #[cold]
    pub(super) fn full(
        &mut self,
        ring: RingId,
        slot: u32,
        ready: &Range<u32>,
        is_live: impl Fn(u32) -> bool,
    ) -> RingFull {
        let slot = match self.choice {
            SlotChoice::Tail => slot,
            SlotChoice::NextFree => {
                // What the end of a burst frees comes before what a device has to finish with.
                let live = self.withheld == 0;
                let taken = |slot: &u32| !self.free.contains(*slot) && !ready.contains(slot);
                (slot..self.count)
                    .chain(0..slot)
                    .find(|slot| taken(slot) && is_live(*slot) == live)
                    .unwrap_or(slot)
            }
        };
        let (wait, count) = if is_live(slot) {
            (FullReason::Unmap, &mut self.stalls.unmap)
        } else {
            (FullReason::BurstEnd, &mut self.stalls.burst_end)
        };
        *count = count.saturating_add(1);
        RingFull {
            ring,
            // A slot of a ring is one that an address can name.
            slot: RingSlot::new(slot).unwrap_or(RingSlot::MAX),
            reason: wait,
        }
    }

    /// `slots` slots were unmapped.
    #[inline]
    pub(super) fn withhold(&mut self, slots: u32) {
        self.withheld = self.withheld.wrapping_add(slots);
    }

    /// Takes `slots` slots from `first` on back; the ring has been invalidated since they were
    /// unmapped.
    #[inline]
    pub(super) fn release(&mut self, first: u32, slots: u32) {
        let given = self.free.give_run(first, slots);
        self.withheld = self.withheld.wrapping_sub(given);
    }
}
