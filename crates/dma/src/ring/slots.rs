//! The slots of one ring: the free ones, the ones that wait for the end of their burst, and the
//! ones that the next maps take.
//!
//! A slot is *free*, then *live* from map to unmap, then *withheld* from unmap to the end of its
//! burst, then free again. Fig. 11 has only two of these states: it counts mappings and trusts the
//! tail. The entries tell which slots are live, so this module does not track that.

use core::ops::Range;

use ringfence_types::{RingId, RingSlot};

use super::free::FreeSlots;
use crate::error::{FullReason, RingFull};

/// The rule that selects the slot of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotChoice {
    /// The slot at the tail, as in Fig. 11. If it is in use, the map waits for it.
    Tail,
    /// The first free slot at or after the tail, with wrap-around. For drivers that do not unmap in
    /// the order of their maps.
    NextFree,
}

/// The number of maps that failed because the ring was full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stalls {
    /// The slot was live.
    pub unmap: u64,
    /// The slot waited for the end of its burst.
    pub burst_end: u64,
}

/// A ring's slots, except those that the mapper has reserved.
#[derive(Debug)]
pub(super) struct Slots {
    choice: SlotChoice,
    /// Number of slots, N in the figure.
    count: u32,
    /// Slots that are neither mapped, withheld nor reserved.
    free: FreeSlots,
    /// Number of slots that are unmapped and wait for the end of their burst.
    withheld: u32,
    stalls: Stalls,
}

impl Slots {
    /// Creates `count` slots, all free.
    pub(super) fn all(count: u32, choice: SlotChoice) -> Self {
        Self {
            choice,
            count,
            free: FreeSlots::all(count),
            withheld: 0,
            stalls: Stalls::default(),
        }
    }

    /// Returns the number of slots, N in the figure.
    #[inline]
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Returns the number of free slots.
    #[inline]
    pub(super) fn free(&self) -> u32 {
        self.free.count()
    }

    /// Returns the number of slots that are unmapped and wait for the end of their burst.
    #[inline]
    pub(super) fn withheld(&self) -> u32 {
        self.withheld
    }

    /// Returns the number of failed maps.
    #[inline]
    pub(super) fn stalls(&self) -> Stalls {
        self.stalls
    }

    /// Reserves slots for the next maps of a ring at `tail`: 1 to 64 slots that do not pass the end
    /// of the ring. `None` if the ring is full.
    pub(super) fn reserve(&mut self, tail: u32) -> Option<Range<u32>> {
        let first = match self.choice {
            SlotChoice::Tail => tail,
            SlotChoice::NextFree => self.free.next(tail).unwrap_or(tail),
        };
        let run = self.free.take_run(first);
        (run > 0).then_some(first..first + run)
    }

    /// Returns the first slot in use that blocks `pieces` maps at `tail`, if `ready` slots are
    /// reserved. `None` if all the maps fit.
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

    /// Creates the error of a map in `ring` that found `slot` in use. A map that takes any slot
    /// reports another slot in use instead. The slots of `ready` are reserved; `is_live` returns
    /// true for mapped slots.
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
                // Prefer a slot that the end of a burst frees over one that waits for the device.
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
            // A slot of a ring always fits in an address.
            slot: RingSlot::new(slot).unwrap_or(RingSlot::MAX),
            reason: wait,
        }
    }

    /// Counts `slots` unmapped slots as withheld.
    #[inline]
    pub(super) fn withhold(&mut self, slots: u32) {
        self.withheld = self.withheld.wrapping_add(slots);
    }

    /// Frees `slots` slots from `first`. The caller has invalidated the ring since their unmap.
    #[inline]
    pub(super) fn release(&mut self, first: u32, slots: u32) {
        let given = self.free.give_run(first, slots);
        self.withheld = self.withheld.wrapping_sub(given);
    }
}
