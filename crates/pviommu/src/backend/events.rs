//! Queue of events for the driver.

use alloc::collections::VecDeque;

use crate::wire::Event;

/// Capacity of the event queue. Further events are counted and dropped.
pub const EVENTS: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Events {
    waiting: VecDeque<Event>,
    dropped: u64,
}

impl Events {
    pub(super) fn push(&mut self, event: Event) {
        if self.waiting.len() < EVENTS {
            self.waiting.push_back(event);
        } else {
            self.dropped = self.dropped.saturating_add(1);
        }
    }

    pub(super) fn pop(&mut self) -> Option<Event> {
        self.waiting.pop_front()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Event> {
        self.waiting.iter()
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}
