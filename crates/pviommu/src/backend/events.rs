//! Stopped accesses on their way to the driver.

use alloc::collections::VecDeque;

use crate::wire::Event;

/// Events that wait for a buffer; further ones are counted and dropped.
pub const EVENTS: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Events {
    waiting: VecDeque<Event>,
    lost: u64,
}

impl Events {
    pub(super) fn push(&mut self, event: Event) {
        if self.waiting.len() < EVENTS {
            self.waiting.push_back(event);
        } else {
            self.lost = self.lost.saturating_add(1);
        }
    }

    pub(super) fn pop(&mut self) -> Option<Event> {
        self.waiting.pop_front()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Event> {
        self.waiting.iter()
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}
