//! Maps and unmaps.

use alloc::vec::Vec;

use ringfence_pgtable::MapRequest;
use ringfence_types::{
    DomainId, FrameSource, PageSize, Permissions, Pfn, PfnRange, PhysMemory, Unmapped,
};

use crate::domain::{Domain, Mapping};
use crate::error::{Failure, UnitError};
use crate::request::{DomainKind, Request};
use crate::requests::Receiver;
use crate::transport::Transport;
use crate::unit::Unit;
use crate::unmap_of::UnmapOf;

const PAGE: u64 = PageSize::Size4K.bytes();

impl<T: Transport, M: PhysMemory, S: FrameSource> Unit<T, M, S> {
    /// Maps pages in `domain`. The domain may have no device yet.
    ///
    /// # Errors
    /// As for [`map_all`](Self::map_all).
    pub fn map(&mut self, domain: DomainId, request: MapRequest) -> Result<(), UnitError> {
        self.map_all(domain, &[request])
    }

    /// Makes several mappings, with as few notifications as the queue allows, and waits for their
    /// answers.
    ///
    /// # Errors
    /// A range overlaps a mapping, or the device refuses. Nothing is mapped, unless the error is
    /// [`UnitError::Failed`], after which [`recover`](Self::recover) restores the mappings that
    /// existed before.
    pub fn map_all(&mut self, domain: DomainId, requests: &[MapRequest]) -> Result<(), UnitError> {
        self.requests.check()?;
        self.capabilities().check_domain(domain)?;
        let mappings = requests.iter().map(|request| self.mapping(request));
        let mappings = mappings.collect::<Result<Vec<_>, _>>()?;
        if mappings.is_empty() {
            return Ok(());
        }
        let known = self.domains.of_kind(domain, DomainKind::Mapped)?;
        let mut inserted = Ok(());
        let mut count: usize = 0;
        for mapping in &mappings {
            inserted = known.insert(*mapping);
            if inserted.is_err() {
                break;
            }
            count = count.wrapping_add(1);
        }
        let is_known_to_device = !known.endpoints.is_empty();
        let mapped = match inserted {
            Ok(()) if is_known_to_device => self.send_maps(domain, &mappings),
            other => other,
        };
        if mapped.is_err() {
            if let Some(known) = self.domains.get_mut(domain) {
                mappings.iter().take(count).for_each(|m| known.remove(m));
            }
            self.domains.tidy(domain);
        }
        mapped
    }

    fn send_maps(&mut self, domain: DomainId, mappings: &[Mapping]) -> Result<(), UnitError> {
        let is_unmapping = |mapping: &Mapping| {
            let range = mapping.range;
            self.requests.is_unmapping(&UnmapOf { domain, range })
        };
        // A device may execute requests in any order.
        if mappings.iter().any(is_unmapping) {
            self.drain()?;
        }
        let maps: Vec<_> = mappings.iter().map(|m| m.request(domain)).collect();
        let mut accepted = Vec::new();
        let mapped = self.execute_all(&maps, |request| accepted.push(*request));
        if mapped.is_err() && self.requests.check().is_ok() {
            let unmaps: Vec<_> = accepted
                .iter()
                .filter_map(|request| match request {
                    Request::Map { domain, range, .. } => Some(Request::Unmap {
                        domain: *domain,
                        range: *range,
                    }),
                    _ => None,
                })
                .collect();
            if self.execute_all(&unmaps, |_| ()).is_err() {
                self.requests.fail(Failure::Refusals);
            }
        }
        mapped
    }

    /// Checks a request.
    fn mapping(&self, request: &MapRequest) -> Result<Mapping, UnitError> {
        let MapRequest {
            iova,
            pa,
            pages,
            permissions,
        } = *request;
        let range = PfnRange::new(Pfn::containing(iova), pages).ok_or(UnitError::Range)?;
        let bytes = pages.checked_mul(PAGE);
        let last = bytes.and_then(|bytes| pa.get().checked_add(bytes.wrapping_sub(1)));
        last.ok_or(UnitError::Range)?;
        let granule = self.capabilities().granule();
        let is_aligned = |at: u64| at.is_multiple_of(granule);
        if !is_aligned(iova.get()) || !is_aligned(pa.get()) || !bytes.is_some_and(is_aligned) {
            return Err(UnitError::Misaligned);
        }
        self.capabilities().check_range(range)?;
        Ok(Mapping {
            range,
            physical: pa,
            permissions,
        })
    }

    /// Queues the UNMAP of `range`, which consists of whole mappings. Devices may access it until
    /// an invalidation completes that covers the token: the device sees the request when the
    /// invalidation is submitted, or earlier.
    ///
    /// # Errors
    /// [`UnitError::QueueFull`]: submit an invalidation and poll it. Nothing changed.
    pub fn unmap(&mut self, domain: DomainId, range: PfnRange) -> Result<Unmapped, UnitError> {
        self.requests.check()?;
        let known = self.domains.get(domain);
        let known = known.ok_or(UnitError::NotMapped(range))?;
        known.check_whole(range)?;
        if !known.endpoints.is_empty() {
            let pages = UnmapOf { domain, range };
            let receiver = Receiver::Invalidations(pages);
            self.requests
                .queue(&self.memory, &pages.request(), receiver)?;
        }
        if let Some(known) = self.domains.get_mut(domain) {
            known.remove_range(range);
        }
        self.domains.tidy(domain);
        Ok(Unmapped::attest_cleared(domain, range))
    }

    /// Returns the permissions of `page` in `domain`; `None` if it is not mapped.
    pub fn lookup(&self, domain: DomainId, page: Pfn) -> Option<Permissions> {
        let mapping = self.domains.get(domain)?.find(page)?;
        Some(mapping.permissions)
    }

    /// Returns true if `domain` has no mapping.
    pub fn is_empty(&self, domain: DomainId) -> bool {
        self.domains.get(domain).is_none_or(Domain::is_empty)
    }
}
