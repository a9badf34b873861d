//! Invalidations of a nested unit (VT-d specification, sections 6.5.2.3 and 6.5.2.4).

use ringfence_types::{
    DomainId, Invalidation, InvalidationError, Invalidator, Pasid, PfnRange, RequesterId, Ticket,
};

use super::NestedUnit;

/// An invalidation by the owner of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NestedInvalidation {
    /// Pages of a first stage (PASID-based IOTLB invalidate, page-selective). The host submits it
    /// for its guest, and fills in the guest's domain.
    FirstStagePages {
        /// Domain of the second stage.
        domain: DomainId,
        /// Tag of the first stage.
        pasid: Pasid,
        /// IOVAs whose entries changed.
        range: PfnRange,
    },
    /// A whole first stage.
    FirstStage {
        /// Domain of the second stage.
        domain: DomainId,
        /// Tag of the first stage.
        pasid: Pasid,
    },
    /// Pages of a second stage (IOTLB invalidate, page-selective-within-domain). Combined
    /// translations do not record their guest-physical page, so the unit drops all of the domain.
    SecondStagePages {
        /// Domain of the second stage.
        domain: DomainId,
        /// Pages of the guest whose frames changed.
        range: PfnRange,
    },
    /// Everything of a domain, of both stages.
    Domain(DomainId),
    /// All entries of all domains.
    Global,
    /// The context of a device, and everything of its domain.
    Context(RequesterId),
}

impl NestedUnit {
    /// Invalidates the entries that `request` covers before it returns.
    pub fn invalidate_nested(&mut self, request: &NestedInvalidation) {
        match request {
            NestedInvalidation::FirstStagePages {
                domain,
                pasid,
                range,
            } => self.combined.invalidate_first(*domain, *pasid, Some(range)),
            NestedInvalidation::FirstStage { domain, pasid } => {
                self.combined.invalidate_first(*domain, *pasid, None);
            }
            NestedInvalidation::SecondStagePages { domain, range } => {
                self.combined.invalidate_domain(*domain, None);
                self.second.invalidate(*domain, Some(range));
            }
            NestedInvalidation::Domain(domain) => {
                self.combined.invalidate_domain(*domain, None);
                self.second.invalidate(*domain, None);
            }
            NestedInvalidation::Global => {
                self.combined.clear();
                self.second.clear();
            }
            NestedInvalidation::Context(device) => match self.contexts.remove(device) {
                Some((_, entry)) => {
                    self.combined.invalidate_domain(entry.domain, None);
                    self.second.invalidate(entry.domain, None);
                }
                None => {
                    self.combined.clear();
                    self.second.clear();
                }
            },
        }
    }
}

/// Requests of a guest that owns first stages. Their pages are IOVAs in every first stage of the
/// domain. A host submits [`NestedInvalidation`]s instead.
impl Invalidator for NestedUnit {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        match request {
            Invalidation::Pages { domain, range, .. } => {
                self.combined.invalidate_domain(domain, Some(&range));
            }
            Invalidation::Domain(domain) => {
                self.invalidate_nested(&NestedInvalidation::Domain(domain));
            }
            Invalidation::Global => self.invalidate_nested(&NestedInvalidation::Global),
            Invalidation::Context(device) => {
                self.invalidate_nested(&NestedInvalidation::Context(device));
            }
            Invalidation::Ring { .. } => return Err(InvalidationError::Unsupported),
        }
        self.last_ticket = self.last_ticket.wrapping_add(1);
        Ok(Ticket::new(self.last_ticket))
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if ticket.get() > self.last_ticket {
            return Err(InvalidationError::Failed);
        }
        Ok(true)
    }
}
