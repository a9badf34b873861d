//! ATTACH and DETACH (virtio 1.3, sections 5.13.6.3 and 5.13.6.4).

use super::Device;
use crate::domain::{AttachKind, Domain, DomainKind};
use crate::endpoint::{AttachState, Endpoint};
use crate::lazy::{VIRTIO_IOMMU_ATTACH_F_LAZY, VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH};
use crate::spec::{VIRTIO_IOMMU_ATTACH_F_BYPASS, VIRTIO_IOMMU_F_BYPASS_CONFIG};
use crate::store::{Entry, MappingStore};
use crate::{DomainId, EndpointId, LimitReached, RequestError, Sink};

impl<S: Sink> Device<S> {
    /// Attaches an endpoint. Detaches it first if it is attached, as if the driver had requested
    /// both. If the sink then refuses the attachment, the endpoint stays in its old domain. The
    /// exception is an endpoint that was alone in `domain` and attaches to it again: it stays
    /// detached.
    pub(super) fn attach(
        &mut self,
        domain: DomainId,
        endpoint: EndpointId,
        flags: u32,
        reserved: u32,
    ) -> Result<(), RequestError> {
        if reserved != 0 {
            return Err(RequestError::ReservedField);
        }
        let mut known_flags = 0;
        if self.has(VIRTIO_IOMMU_F_BYPASS_CONFIG) {
            known_flags |= VIRTIO_IOMMU_ATTACH_F_BYPASS;
        }
        if self.has(VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH) {
            known_flags |= VIRTIO_IOMMU_ATTACH_F_LAZY;
        }
        if flags & !known_flags != 0 {
            return Err(RequestError::UnknownFlags(flags & !known_flags));
        }
        let bypass = flags & VIRTIO_IOMMU_ATTACH_F_BYPASS != 0;
        let kind = match (bypass, flags & VIRTIO_IOMMU_ATTACH_F_LAZY != 0) {
            (false, false) => AttachKind::Strict,
            (false, true) => AttachKind::Lazy,
            (true, false) => AttachKind::Bypass,
            (true, true) => return Err(RequestError::LazyMismatch(domain)),
        };
        let at = self
            .find_endpoint(endpoint)
            .map_err(|_| RequestError::NoEndpoint(endpoint))?;
        if !self.options.domains.contains(domain) {
            return Err(RequestError::DomainOutOfRange(domain));
        }
        let existing = self.find_domain(domain);
        if let Ok(index) = existing {
            self.may_join(index, at, kind)?;
        }
        let left = self.endpoints.get(at).and_then(Endpoint::domain);
        let is_last_endpoint = left.is_some_and(|id| {
            self.find_domain(id)
                .is_ok_and(|index| self.domains.get(index).is_some_and(|d| d.endpoints == 1))
        });
        if is_last_endpoint && left == Some(domain) {
            // The domain would be its own successor.
            self.leave_domain(at, domain);
            return self.attach_new(at, domain, kind);
        }
        if existing.is_err() {
            if self.domains.len() - usize::from(is_last_endpoint) >= self.options.limits.domains {
                return Err(RequestError::LimitReached(LimitReached::Domains));
            }
            self.attach_new(at, domain, kind)?;
        } else {
            self.attach_existing(at, domain)?;
        }
        if let Some(id) = left {
            self.remove_from_domain(id);
        }
        Ok(())
    }

    pub(super) fn detach(
        &mut self,
        domain: DomainId,
        endpoint: EndpointId,
    ) -> Result<(), RequestError> {
        let at = self
            .find_endpoint(endpoint)
            .map_err(|_| RequestError::NoEndpoint(endpoint))?;
        if self.endpoints.get(at).and_then(Endpoint::domain) != Some(domain) {
            return Err(RequestError::NotAttached { endpoint, domain });
        }
        self.leave_domain(at, domain);
        Ok(())
    }

    /// Returns `Ok` if the endpoint at index `at` may join the existing domain at `index`.
    fn may_join(&self, index: usize, at: usize, kind: AttachKind) -> Result<(), RequestError> {
        let (Some(domain), Some(endpoint)) = (self.domains.get(index), self.endpoints.get(at))
        else {
            return Ok(());
        };
        match &domain.kind {
            DomainKind::Blocked => Err(RequestError::Blocked(domain.id)),
            DomainKind::Bypass if kind == AttachKind::Bypass => Ok(()),
            DomainKind::Mapped(store) if kind != AttachKind::Bypass => {
                if domain.lazy != (kind == AttachKind::Lazy) {
                    return Err(RequestError::LazyMismatch(domain.id));
                }
                let mapped = endpoint.reserved.iter().any(|region| {
                    store.touches(region.range.start().get(), region.range.last().get())
                });
                if mapped {
                    return Err(RequestError::Incompatible {
                        endpoint: endpoint.id,
                        domain: domain.id,
                    });
                }
                Ok(())
            }
            DomainKind::Bypass | DomainKind::Mapped(_) => {
                Err(RequestError::BypassMismatch(domain.id))
            }
        }
    }

    /// Creates a domain with the endpoint at index `at`.
    fn attach_new(
        &mut self,
        at: usize,
        id: DomainId,
        kind: AttachKind,
    ) -> Result<(), RequestError> {
        self.domains
            .try_reserve(1)
            .map_err(|_| RequestError::LimitReached(LimitReached::Memory))?;
        match kind {
            AttachKind::Bypass => {}
            AttachKind::Strict => self.sink.create(id)?,
            AttachKind::Lazy => self.sink.create_lazy(id)?,
        }
        let bypass = kind == AttachKind::Bypass;
        let reach = if bypass {
            DomainKind::Bypass
        } else {
            DomainKind::Mapped(MappingStore::default())
        };
        let index = self.find_domain(id).unwrap_or_else(|index| index);
        self.domains.insert(
            index,
            Domain {
                id,
                kind: reach,
                lazy: kind == AttachKind::Lazy,
                endpoints: 0,
                reserved: alloc::vec::Vec::new(),
            },
        );
        let entered = self.attach_existing(at, id);
        if entered.is_err() {
            self.domains.remove(index);
            if !bypass {
                self.sink.destroy(id);
            }
        }
        entered
    }

    /// Attaches the endpoint at index `at` to an existing domain. Does not update its old domain.
    fn attach_existing(&mut self, at: usize, id: DomainId) -> Result<(), RequestError> {
        let Ok(index) = self.find_domain(id) else {
            return Err(RequestError::NoDomain(id));
        };
        let (Some(domain), Some(endpoint)) =
            (self.domains.get_mut(index), self.endpoints.get_mut(at))
        else {
            return Err(RequestError::NoDomain(id));
        };
        domain
            .reserved
            .try_reserve(endpoint.reserved.len())
            .map_err(|_| RequestError::LimitReached(LimitReached::Memory))?;
        match &domain.kind {
            DomainKind::Bypass => self.sink.bypass(endpoint.id)?,
            DomainKind::Mapped(store) => {
                let mut mappings = store.iter().filter_map(Entry::mapping);
                self.sink.attach(endpoint.id, id, &mut mappings)?;
            }
            DomainKind::Blocked => return Err(RequestError::Blocked(id)),
        }
        for region in &endpoint.reserved {
            if !domain.reserved.contains(&region.range) {
                domain.reserved.push(region.range);
            }
        }
        if endpoint.domain() != Some(id) {
            domain.endpoints += 1;
        }
        endpoint.state = AttachState::Attached(id);
        Ok(())
    }

    /// Detaches the endpoint at index `at` from its domain `id`. It gets the access of unattached
    /// endpoints.
    pub(super) fn leave_domain(&mut self, at: usize, id: DomainId) {
        if let Some(endpoint) = self.endpoints.get_mut(at) {
            endpoint.detach(self.bypass, &mut self.sink);
        }
        self.remove_from_domain(id);
    }

    /// Updates domain `id` after an endpoint has left. Removes the domain after the last one.
    fn remove_from_domain(&mut self, id: DomainId) {
        let Ok(index) = self.find_domain(id) else {
            return;
        };
        let Some(domain) = self.domains.get_mut(index) else {
            return;
        };
        domain.endpoints = self
            .endpoints
            .iter()
            .filter(|endpoint| endpoint.domain() == Some(id))
            .count();
        if domain.endpoints > 0 {
            domain.reserved.clear();
            let still = self
                .endpoints
                .iter()
                .filter(|endpoint| endpoint.domain() == Some(id));
            for region in still.flat_map(|endpoint| &endpoint.reserved) {
                // The vector had room for all of them before one left.
                if !domain.reserved.contains(&region.range) {
                    domain.reserved.push(region.range);
                }
            }
            return;
        }
        if let DomainKind::Mapped(store) = &domain.kind {
            self.mappings = self.mappings.saturating_sub(store.len());
            self.sink.destroy(id);
        }
        self.domains.remove(index);
        self.hot = 0;
    }
}
