//! The unit as the host uses it.

use ringfence_types::{Invalidation, InvalidationError, Invalidator, Ticket};

use crate::hardware::Vtd;
use crate::meter::InvalidationQueue;

/// The unit that walks a host's tables.
#[derive(Debug)]
pub enum HostUnit {
    /// The modelled one.
    Modelled {
        /// It.
        vtd: Box<Vtd>,
        /// Invalidations completed and not yet looked at.
        completed: Vec<Invalidation>,
        /// All of them so far.
        count: u64,
    },
    /// The meter's: descriptors are written, and nobody translates.
    CostOnly(InvalidationQueue),
}

impl HostUnit {
    /// The modelled one.
    pub fn modelled(vtd: Vtd) -> Self {
        Self::Modelled {
            vtd: Box::new(vtd),
            completed: Vec::new(),
            count: 0,
        }
    }

    /// Moves what was completed since the last call to the end of `into`.
    pub fn drain_completed(&mut self, into: &mut Vec<Invalidation>) {
        if let Self::Modelled { completed, .. } = self {
            into.append(completed);
        }
    }

    /// Invalidations so far.
    pub fn invalidations(&self) -> u64 {
        match self {
            Self::Modelled { count, .. } => *count,
            Self::CostOnly(queue) => queue.requests(),
        }
    }

    /// Has it forget something, and waits for that.
    ///
    /// # Errors
    /// It may not have.
    #[inline]
    pub fn invalidate(&mut self, request: Invalidation) -> Result<(), InvalidationError> {
        let ticket = self.submit(request)?;
        while !self.poll(ticket)? {}
        Ok(())
    }
}

impl Invalidator for HostUnit {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        match self {
            Self::Modelled {
                vtd,
                completed,
                count,
            } => {
                let ticket = vtd.unit.submit(request)?;
                *count += 1;
                // The unit completes what it accepts before it returns.
                completed.push(request);
                Ok(ticket)
            }
            Self::CostOnly(queue) => queue.submit(request),
        }
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        match self {
            Self::Modelled { vtd, .. } => vtd.unit.poll(ticket),
            Self::CostOnly(queue) => queue.poll(ticket),
        }
    }
}
