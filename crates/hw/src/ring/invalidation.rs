//! The invalidation interface of a ring unit: `riotlb_invalidate` (rIOMMU Fig. 11), and the
//! requests that every unit supports.

use ringfence_types::{Invalidation, InvalidationError, Invalidator, Ticket};

use super::logic::RingLogic;
use super::riotlb::RingKey;
use super::stats::count;
use super::unit::RingUnit;

impl<L: RingLogic> RingUnit<L> {
    /// Purges the entries that `request` covers before it returns. An rIOTLB entry is dropped as a
    /// whole, including the copy of the next slot. A request for pages therefore drops every ring
    /// that it overlaps.
    #[inline]
    pub fn invalidate(&mut self, request: &Invalidation) {
        let counts = &mut self.state.stats.invalidations;
        match request {
            Invalidation::Ring { device, ring, .. } => {
                count(&mut counts.ring);
                self.riotlb.remove(RingKey::new(*device, *ring));
            }
            Invalidation::Pages {
                domain: target,
                range,
                ..
            } => {
                count(&mut counts.pages);
                self.riotlb
                    .remove_if(|_, ring, domain| domain == *target && ring.pages().overlaps(range));
            }
            Invalidation::Domain(target) => {
                count(&mut counts.domain);
                self.riotlb.remove_if(|_, _, domain| domain == *target);
            }
            Invalidation::Global => {
                count(&mut counts.global);
                self.riotlb.clear();
            }
            Invalidation::Context(target) => {
                count(&mut counts.context);
                self.contexts.remove(*target);
                self.riotlb.remove_if(|device, _, _| device == *target);
            }
        }
    }
}

/// Completes every request before it returns from [`submit`](Invalidator::submit).
impl<L: RingLogic> Invalidator for RingUnit<L> {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.invalidate(&request);
        self.last_ticket = self.last_ticket.wrapping_add(1);
        Ok(Ticket::new(self.last_ticket))
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if ticket.get() > self.last_ticket {
            return Err(InvalidationError::Failed);
        }
        Ok(true)
    }
}
