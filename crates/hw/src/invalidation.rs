//! The invalidation interface (HW06, HW07; VT-d specification, section 6.5).

use ringfence_types::{
    CachedLevels, Invalidation, InvalidationError, Invalidator, RequesterId, Ticket,
};

use crate::{ContextLookup, InvalidationGranularity, Iommu};

impl<D: ContextLookup> Iommu<D> {
    /// Purges what `request` names, at once. A ring's entry is in no cache of this unit, so there
    /// is nothing to purge.
    #[inline]
    pub fn invalidate(&mut self, request: &Invalidation) {
        let counts = &mut self.walker.stats.invalidations;
        let count = match request {
            Invalidation::Pages { .. } => &mut counts.pages,
            Invalidation::Domain(_) => &mut counts.domain,
            Invalidation::Global => &mut counts.global,
            Invalidation::Context(_) => &mut counts.context,
            Invalidation::Ring { .. } => &mut counts.ring,
        };
        *count = count.wrapping_add(1);
        match (request, self.granularity) {
            (Invalidation::Context(device), _) => self.invalidate_context(*device),
            (Invalidation::Global, _) => self.invalidate_translations(),
            (Invalidation::Ring { .. }, _) => {}
            (_, InvalidationGranularity::GlobalOnly) => self.widen(),
            (Invalidation::Domain(domain), InvalidationGranularity::Selective) => {
                self.walker.iotlb.invalidate_domain(*domain);
                self.walker.walk_caches.invalidate_domain(*domain);
            }
            (
                Invalidation::Pages {
                    domain,
                    range,
                    levels,
                },
                InvalidationGranularity::Selective,
            ) => {
                self.walker.iotlb.invalidate_pages(*domain, range);
                if *levels == CachedLevels::All {
                    self.walker.walk_caches.invalidate_pages(*domain, range);
                }
            }
        }
    }

    /// All translations of all domains. Contexts stay: they have an invalidation of their own.
    fn invalidate_translations(&mut self) {
        self.walker.iotlb.invalidate_all();
        self.walker.walk_caches.invalidate_all();
    }

    #[cold]
    fn widen(&mut self) {
        self.walker.stats.widened = self.walker.stats.widened.wrapping_add(1);
        self.invalidate_translations();
    }

    /// The context of `device`, and the translations of the domain it named. If the context has
    /// been replaced in its cache meanwhile, nobody knows which domain that was, and everything
    /// goes.
    fn invalidate_context(&mut self, device: RequesterId) {
        match (self.contexts.remove(device), self.granularity) {
            (Some(cached), InvalidationGranularity::Selective) => {
                let domain = cached.entry.domain();
                self.walker.iotlb.invalidate_domain(domain);
                self.walker.walk_caches.invalidate_domain(domain);
            }
            _ => self.widen(),
        }
    }
}

/// Completes every request before it returns from [`submit`](Invalidator::submit), but refuses one
/// for a ring: to say that it has completed would certify what another unit still caches. What a
/// delay uncovers is tested with [`fake::Delayed`](crate::fake::Delayed).
impl<D: ContextLookup> Invalidator for Iommu<D> {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if matches!(request, Invalidation::Ring { .. }) {
            return Err(InvalidationError::Unsupported);
        }
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
