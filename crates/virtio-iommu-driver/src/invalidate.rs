//! The port `Invalidator`: an invalidation completes when the device has answered the UNMAPs that
//! were queued before it.

use ringfence_types::{
    FrameSource, Invalidation, InvalidationError, Invalidator, PhysMemory, Ticket,
};

use crate::transport::Transport;
use crate::unit::Unit;

impl<T: Transport, M: PhysMemory, S: FrameSource> Unit<T, M, S> {
    /// Shows the device all queued UNMAPs with one notification, and first repeats refused ones
    /// that `requests` name.
    ///
    /// The device owns the table and has no cache that the driver could invalidate, so the scope
    /// selects only what is repeated: the ticket stands for all UNMAPs so far.
    ///
    /// # Errors
    /// [`InvalidationError::QueueFull`] if refused UNMAPs do not fit; nothing changed.
    /// [`InvalidationError::Unsupported`] for a ring.
    pub fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        let is_ring = |request: &Invalidation| matches!(request, Invalidation::Ring { .. });
        if requests.iter().any(is_ring) {
            return Err(InvalidationError::Unsupported);
        }
        self.requests.check()?;
        self.requests.repeat_refused(&self.memory, requests)?;
        self.requests.kick(&self.memory, &mut self.transport)?;
        Ok(Ticket::new(self.requests.submitted()))
    }
}

impl<T: Transport, M: PhysMemory, S: FrameSource> Invalidator for Unit<T, M, S> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.submit_all(&[request])
    }

    /// [`InvalidationError::Failed`] means that the device refused an UNMAP up to `ticket`: submit
    /// again, or detach the domain's devices. Or that the device failed:
    /// [`recover`](Unit::recover). [`InvalidationError::TimedOut`] does not end the wait; the
    /// caller may poll again.
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.requests.poll(&self.memory, &self.transport, ticket)
    }
}
