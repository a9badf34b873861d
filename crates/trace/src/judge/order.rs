//! Sorts the events of a trace by time.
//!
//! `trace_pipe` prints the events of each CPU in order, but those of two CPUs can be out of order.
//! A bounded queue sorts them. Events of one time keep the order of their lines.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ringfence_types::Nanos;

use super::frames::{Mapping, Owner, Pages};

/// Number of events that wait for an earlier one.
const EVENTS: usize = 64 * 1024;

/// Number of ranges that the waiting maps have together.
const RANGES: usize = 1 << 20;

/// Effect of an event.
#[derive(Debug)]
pub(super) enum Step {
    /// Creates the mapping of this number.
    Map(u64, Box<Mapping>),
    /// Removes the mapping of this number, on this CPU.
    Unmap(u64, u16),
    /// The page allocator gives pages to a task.
    Allocate(Pages, Owner),
    /// A task frees pages.
    Free(Pages, Owner),
}

impl Step {
    fn ranges(&self) -> usize {
        match self {
            Self::Map(_, mapping) => mapping.ranges(),
            Self::Unmap(..) | Self::Allocate(..) | Self::Free(..) => 0,
        }
    }
}

/// An event, its time and its line.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) time: Nanos,
    pub(super) line: u64,
    pub(super) step: Step,
    number: u64,
}

impl Item {
    pub(super) fn new(time: Nanos, line: u64, step: Step) -> Self {
        Self {
            time,
            line,
            step,
            number: 0,
        }
    }

    fn key(&self) -> (Nanos, u64) {
        (self.time, self.number)
    }
}

impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Item {}

impl PartialOrd for Item {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Item {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// The waiting events.
#[derive(Debug, Default)]
pub(super) struct Reorder {
    waiting: BinaryHeap<Reverse<Item>>,
    pushed: u64,
    ranges: usize,
    now: Nanos,
    late: u64,
}

impl Reorder {
    pub(super) fn push(&mut self, mut item: Item) {
        item.number = self.pushed;
        self.pushed += 1;
        self.ranges += item.step.ranges();
        self.waiting.push(Reverse(item));
    }

    /// Returns the earliest event if more events or ranges wait than the queue holds.
    pub(super) fn pop_full(&mut self) -> Option<Item> {
        match self.waiting.len() > EVENTS || self.ranges > RANGES {
            true => self.pop(),
            false => None,
        }
    }

    /// Returns the earliest event. If it is earlier than an event that was already returned, it
    /// gets the time of that event and counts as late.
    pub(super) fn pop(&mut self) -> Option<Item> {
        let Reverse(mut item) = self.waiting.pop()?;
        self.ranges -= item.step.ranges();
        if item.time < self.now {
            self.late += 1;
            item.time = self.now;
        }
        self.now = item.time;
        Some(item)
    }

    /// Returns the number of events that arrived too late to be sorted.
    pub(super) fn late(&self) -> u64 {
        self.late
    }
}
