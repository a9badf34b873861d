//! The pages that an UNMAP request names.

use ringfence_types::{DomainId, Invalidation, PfnRange};

use crate::request::Request;

/// Pages of an UNMAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnmapOf {
    pub(crate) domain: DomainId,
    pub(crate) range: PfnRange,
}

impl UnmapOf {
    pub(crate) const fn request(&self) -> Request {
        Request::Unmap {
            domain: self.domain,
            range: self.range.iovas(),
        }
    }

    /// Returns true if `request` names some of the pages.
    pub(crate) fn is_named_by(&self, request: &Invalidation) -> bool {
        match request {
            Invalidation::Pages { domain, range, .. } => {
                *domain == self.domain && range.overlaps(&self.range)
            }
            Invalidation::Domain(domain) => *domain == self.domain,
            Invalidation::Global => true,
            Invalidation::Context(_) | Invalidation::Ring { .. } => false,
        }
    }
}
