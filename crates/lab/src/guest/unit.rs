//! The host's interface to the unit.

use ringfence_types::{Invalidation, InvalidationError, Invalidator, Ticket};

use crate::hardware::{Hardware, Vtd};
use crate::layer::TimedInvalidationQueue;

/// The unit of a host.
#[derive(Debug)]
pub enum HostUnit<H = Vtd> {
    /// A modelled unit.
    Modelled {
        /// The modelled unit.
        hardware: Box<H>,
        /// Completed invalidations since the last call of `drain_completed`.
        completed: Vec<Invalidation>,
        /// Number of completed invalidations so far.
        count: u64,
    },
    /// The unit of timed replays: it writes descriptors and translates nothing.
    CostOnly(TimedInvalidationQueue),
}

impl<H: Hardware> HostUnit<H> {
    /// Creates a modelled unit.
    pub fn modelled(hardware: H) -> Self {
        Self::Modelled {
            hardware: Box::new(hardware),
            completed: Vec::new(),
            count: 0,
        }
    }

    /// Appends the invalidations completed since the last call to `into`.
    pub fn drain_completed(&mut self, into: &mut Vec<Invalidation>) {
        if let Self::Modelled { completed, .. } = self {
            into.append(completed);
        }
    }

    /// Returns the number of invalidations so far.
    pub fn invalidations(&self) -> u64 {
        match self {
            Self::Modelled { count, .. } => *count,
            Self::CostOnly(queue) => queue.requests(),
        }
    }

    /// Submits an invalidation and waits for its completion.
    ///
    /// # Errors
    /// The invalidation failed; cached translations may remain.
    #[inline]
    pub fn invalidate(&mut self, request: Invalidation) -> Result<(), InvalidationError> {
        let ticket = self.submit(request)?;
        while !self.poll(ticket)? {}
        Ok(())
    }
}

impl<H: Hardware> Invalidator for HostUnit<H> {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        match self {
            Self::Modelled {
                hardware,
                completed,
                count,
            } => {
                let ticket = hardware.invalidator().submit(request)?;
                *count += 1;
                // The unit completes a request before `submit` returns.
                completed.push(request);
                Ok(ticket)
            }
            Self::CostOnly(queue) => queue.submit(request),
        }
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        match self {
            Self::Modelled { hardware, .. } => hardware.invalidator().poll(ticket),
            Self::CostOnly(queue) => queue.poll(ticket),
        }
    }
}
