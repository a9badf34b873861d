//! A unit whose invalidations complete late.

use std::collections::VecDeque;

use ringfence_hw::{ContextLookup, Iommu, Translate, Translation};
use ringfence_types::{
    Access, Fault, Invalidation, InvalidationError, Invalidator, Iova, PhysMemory, RequesterId,
    Ticket,
};

/// A unit with an invalidation queue: a request takes effect only after a number of polls. Until
/// then devices can use the stale entries. This exposes a layer that reuses an address or returns a
/// buffer without waiting.
#[derive(Debug)]
pub struct Delayed<D: ContextLookup> {
    unit: Iommu<D>,
    /// Polls that the request at the head of the queue waits for.
    polls: u32,
    left: u32,
    queue: VecDeque<(Ticket, Invalidation)>,
    capacity: usize,
    submitted: u64,
}

impl<D: ContextLookup> Delayed<D> {
    /// Wraps `unit` with a queue of `capacity` requests. The oldest request waits for `polls` polls
    /// (of any ticket) and takes effect at the next one.
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

    /// Returns the unit that devices access.
    pub fn unit(&mut self) -> &mut Iommu<D> {
        &mut self.unit
    }

    /// Returns the number of requests that have not taken effect.
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

/// Translates through the wrapped unit.
impl<D: ContextLookup> Translate for Delayed<D> {
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        self.unit.translate(mem, device, iova, bytes, access)
    }
}
