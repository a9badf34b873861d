//! A unit whose invalidations complete late.

use alloc::collections::VecDeque;

use ringfence_types::{Invalidation, InvalidationError, Invalidator, Ticket};

use crate::{ContextLookup, Iommu};

/// A unit behind a queue: a request takes effect only when it has been polled for often enough.
/// Until then devices go on using what it names, so a layer that reuses an address or hands a
/// buffer back without waiting is found out.
#[derive(Debug)]
pub struct Delayed<D: ContextLookup> {
    unit: Iommu<D>,
    /// Polls that each request takes once it is at the head of the queue.
    polls: u32,
    left: u32,
    queue: VecDeque<(Ticket, Invalidation)>,
    capacity: usize,
    submitted: u64,
}

impl<D: ContextLookup> Delayed<D> {
    /// `unit` with room for `capacity` requests, each of which takes `polls` polls (of any ticket)
    /// to complete after those before it.
    pub fn new(unit: Iommu<D>, polls: u32, capacity: usize) -> Self {
        Self {
            unit,
            polls,
            left: polls,
            queue: VecDeque::new(),
            capacity,
            submitted: 0,
        }
    }

    /// The unit as devices see it.
    pub fn unit(&mut self) -> &mut Iommu<D> {
        &mut self.unit
    }

    /// Requests that have not taken effect.
    pub fn outstanding(&self) -> usize {
        self.queue.len()
    }
}

impl<D: ContextLookup> Invalidator for Delayed<D> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if matches!(request, Invalidation::Ring { .. }) {
            return Err(InvalidationError::Unsupported);
        }
        if self.queue.len() >= self.capacity {
            return Err(InvalidationError::QueueFull);
        }
        self.submitted = self.submitted.wrapping_add(1);
        let ticket = Ticket::new(self.submitted);
        self.queue.push_back((ticket, request));
        Ok(ticket)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if ticket.get() > self.submitted {
            return Err(InvalidationError::Failed);
        }
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
        } else if let Some((_, request)) = self.queue.pop_front() {
            self.unit.invalidate(&request);
            self.left = self.polls;
        }
        Ok(self
            .queue
            .front()
            .is_none_or(|(oldest, _)| *oldest > ticket))
    }
}
