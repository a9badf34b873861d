//! Predicts the maps that wait in a ring of N slots. The model is independent of the driver and
//! checks it.

use std::collections::{BTreeMap, HashMap};

use ringfence_dma::ring::SlotChoice;
use ringfence_trace::MappingId;

use super::advice::Stalls;
use super::bursts::Bursts;
use crate::plan::Step;

/// A ring of N slots, each free, live or withheld, with its queue of waiting maps (decision 0012).
#[derive(Debug, Clone)]
pub struct RingSlots {
    choice: SlotChoice,
    size: u32,
    used: u32,
    tail: u32,
    /// True for each slot in use. Unused, and empty, with `SlotChoice::NextFree`.
    busy: Vec<bool>,
    /// First slot and number of slots of each mapping; 0 slots if unmapped.
    mapped: Vec<(u32, u32)>,
    bursts: Bursts<(u32, u32)>,
    /// Waiting maps by ticket, and the ticket of each mapping, so that removal is logarithmic.
    waiting: BTreeMap<u64, (MappingId, u32)>,
    turns: HashMap<MappingId, u64>,
    next: u64,
    stalls: Stalls,
}

impl RingSlots {
    /// Creates a ring of `size` free slots.
    pub fn new(choice: SlotChoice, size: u32) -> Self {
        Self {
            choice,
            size,
            used: 0,
            tail: 0,
            busy: match choice {
                SlotChoice::Tail => vec![false; size as usize],
                SlotChoice::NextFree => Vec::new(),
            },
            mapped: Vec::new(),
            bursts: Bursts::default(),
            waiting: BTreeMap::new(),
            turns: HashMap::new(),
            next: 0,
            stalls: Stalls::default(),
        }
    }

    /// Performs one step of a plan for this ring.
    pub fn step(&mut self, step: &Step) {
        match *step {
            Step::Map { id, count, .. } => {
                if !self.waiting.is_empty() || !self.map(id, count) {
                    self.stalls.stalls += 1;
                    self.waiting.insert(self.next, (id, count));
                    self.turns.insert(id, self.next);
                    self.next += 1;
                }
            }
            Step::Unmap { id, cpu, .. } => {
                if let Some(turn) = self.turns.remove(&id) {
                    self.waiting.remove(&turn);
                    self.stalls.stalled_out += 1;
                } else if let Some(held) = self.mapped.get_mut(id.index())
                    && held.1 > 0
                {
                    let held = std::mem::take(held);
                    for part in self.bursts.withhold(cpu, held) {
                        self.release(part);
                    }
                }
                self.retry();
            }
            Step::EndBurst { cpu, .. } => {
                for held in self.bursts.end(cpu) {
                    self.release(held);
                }
                self.retry();
            }
            Step::Doorbell { .. } | Step::EndDescriptor { .. } | Step::Tick => {}
        }
    }

    /// Ends the trace. Maps that still wait count as stalled out.
    pub fn finish(mut self) -> Stalls {
        self.stalls.stalled_out += self.waiting.len() as u64;
        self.stalls
    }

    /// Returns true if the map need not wait: it got its slots, or it is larger than the ring.
    fn map(&mut self, id: MappingId, count: u32) -> bool {
        if count > self.size {
            self.stalls.refused += 1;
            return true;
        }
        if self.size - self.used < count {
            return false;
        }
        let size = self.size;
        let first = self.tail;
        if self.choice == SlotChoice::Tail {
            let wanted = (first..first + count).map(|slot| (slot % size) as usize);
            if wanted.clone().any(|slot| self.busy[slot]) {
                return false;
            }
            wanted.for_each(|slot| self.busy[slot] = true);
            self.tail = (first + count) % size;
        }
        self.used += count;
        if self.mapped.len() <= id.index() {
            self.mapped.resize(id.index() + 1, (0, 0));
        }
        self.mapped[id.index()] = (first, count);
        true
    }

    fn release(&mut self, (first, count): (u32, u32)) {
        self.used -= count;
        if self.choice == SlotChoice::Tail {
            for slot in first..first + count {
                self.busy[(slot % self.size) as usize] = false;
            }
        }
    }

    fn retry(&mut self) {
        while let Some((&turn, &(id, count))) = self.waiting.first_key_value() {
            if !self.map(id, count) {
                break;
            }
            self.waiting.remove(&turn);
            self.turns.remove(&id);
        }
    }
}
