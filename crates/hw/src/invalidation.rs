//! The invalidation interface (VT-d specification, section 6.5).

use ringfence_types::{
    CachedLevels, Invalidation, InvalidationError, Invalidator, RequesterId, Ticket,
};

use crate::{ContextLookup, InvalidationGranularity, Iommu};

impl<D: ContextLookup> Iommu<D> {
    /// Purges the entries that `request` covers before it returns. This unit caches no ring
    /// entries, so it ignores requests for rings.
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

    /// Drops all translations of all domains. Keeps contexts, which have their own invalidation.
    fn invalidate_translations(&mut self) {
        self.walker.iotlb.invalidate_all();
        self.walker.walk_caches.invalidate_all();
    }

    #[cold]
    fn widen(&mut self) {
        self.walker.stats.widened = self.walker.stats.widened.wrapping_add(1);
        self.invalidate_translations();
    }

    /// Drops the context of `device` and all translations of its domain. If the context cache has
    /// since evicted the context, the domain is unknown and all translations are dropped.
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

/// Completes every request before it returns from [`submit`](Invalidator::submit). Rejects a
/// request for a ring: completing it would certify that entries cached by another unit are gone.
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
