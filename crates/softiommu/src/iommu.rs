//! The unit: endpoints, domains, attachments and memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::mem;
use std::sync::Arc;

use ringfence_types::{DomainId, RequesterId};

use crate::domain::Domain;
use crate::domain_mut::DomainMut;
use crate::endpoint::{AttachedDomain, Endpoint, ReaderView};
use crate::error::{IommuError, ReadSectionOpen};
use crate::guard_count;
use crate::qsbr::{Qsbr, start_grace_period, synchronize};
use crate::reader::Reader;
use crate::table::Width;

/// Resource limits. A guest controls the use of these resources up to the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SoftIommuLimits {
    /// Address width of every domain.
    pub width: Width,
    /// Maximum number of tables of a domain, 4 KiB each, including the root. A leaf table maps 2
    /// MiB.
    pub tables: usize,
    /// Maximum number of domains.
    pub domains: usize,
    /// Maximum number of endpoints.
    pub endpoints: usize,
    /// Maximum number of readers of an endpoint: one per thread that accesses memory for it.
    pub readers: usize,
}

impl Default for SoftIommuLimits {
    /// 48 bits; 64 domains with 16 MiB of tables each, which map 8 GiB; 64 endpoints with 32
    /// readers each.
    fn default() -> Self {
        Self {
            width: Width::BITS_48,
            tables: 4096,
            domains: 64,
            endpoints: 64,
            readers: 32,
        }
    }
}

/// Writer side of a software IOMMU over the memory `M`. There is one writer, enforced by `&mut`.
/// Existing readers do not need access to the `SoftIommu`.
///
/// An endpoint is blocked until it is attached to a domain or set to bypass.
pub struct SoftIommu<M> {
    limits: SoftIommuLimits,
    memory: Arc<M>,
    endpoints: BTreeMap<RequesterId, Attached<M>>,
    domains: BTreeMap<DomainId, Domain<M>>,
    /// Endpoints changed since the last wait for readers, each with its previous domain.
    changed: Vec<(Arc<Endpoint<M>>, Option<DomainId>)>,
}

/// An endpoint and the domain that it is attached to.
struct Attached<M> {
    endpoint: Arc<Endpoint<M>>,
    domain: Option<DomainId>,
}

impl<M> SoftIommu<M> {
    /// Creates a unit over `memory` without endpoints and domains.
    pub fn new(limits: SoftIommuLimits, memory: M) -> Self {
        Self {
            limits,
            memory: Arc::new(memory),
            endpoints: BTreeMap::new(),
            domains: BTreeMap::new(),
            changed: Vec::new(),
        }
    }

    /// Returns the limits.
    pub fn limits(&self) -> &SoftIommuLimits {
        &self.limits
    }

    /// Adds an endpoint. It is blocked.
    pub fn add_endpoint(&mut self, device: RequesterId) -> Result<(), IommuError> {
        if self.endpoints.contains_key(&device) {
            return Err(IommuError::EndpointExists(device));
        }
        if self.endpoints.len() >= self.limits.endpoints {
            return Err(IommuError::TooManyEndpoints(device));
        }
        let endpoint = Endpoint::new(device, self.limits.readers, Arc::clone(&self.memory));
        let attached = Attached {
            endpoint: Arc::new(endpoint),
            domain: None,
        };
        self.endpoints.insert(device, attached);
        Ok(())
    }

    /// Removes an endpoint. On return, its readers are blocked permanently.
    pub fn remove_endpoint(&mut self, device: RequesterId) -> Result<(), IommuError> {
        self.detach(device)?;
        self.endpoints.remove(&device);
        Ok(())
    }

    /// Creates a reader for one thread that accesses memory for `device`.
    pub fn reader(&self, device: RequesterId) -> Result<Reader<M>, IommuError> {
        let attached = self
            .endpoints
            .get(&device)
            .ok_or(IommuError::NoEndpoint(device))?;
        Reader::new(Arc::clone(&attached.endpoint)).ok_or(IommuError::TooManyReaders(device))
    }

    /// Creates an empty domain.
    pub fn create_domain(&mut self, domain: DomainId) -> Result<DomainMut<'_, M>, IommuError> {
        if self.domains.len() >= self.limits.domains {
            return Err(IommuError::TooManyDomains(domain));
        }
        let (width, tables) = (self.limits.width, self.limits.tables);
        match self.domains.entry(domain) {
            Entry::Occupied(_) => Err(IommuError::DomainExists(domain)),
            Entry::Vacant(free) => {
                let created = Domain::new(domain, width, tables);
                let created = free.insert(created.ok_or(IommuError::NoMemory(domain))?);
                Ok(DomainMut::new(created))
            }
        }
    }

    /// Removes a domain and its mappings. No endpoint may be attached to it.
    pub fn remove_domain(&mut self, domain: DomainId) -> Result<(), IommuError> {
        if self.existing(domain)?.has_endpoints() {
            return Err(IommuError::DomainInUse(domain));
        }
        self.domains.remove(&domain);
        Ok(())
    }

    /// Returns a handle to map and unmap in the domain. The domain itself stays in its unit, which
    /// waits for the domain's readers.
    ///
    /// ```compile_fail,E0308
    /// use ringfence_softiommu::SoftIommu;
    /// use ringfence_types::DomainId;
    ///
    /// // The domains of two units cannot be swapped.
    /// fn swap(a: &mut SoftIommu<()>, b: &mut SoftIommu<()>, id: DomainId) {
    ///     if let (Ok(a), Ok(b)) = (a.domain(id), b.domain(id)) {
    ///         std::mem::swap(a, b);
    ///     }
    /// }
    /// ```
    #[inline]
    pub fn domain(&mut self, domain: DomainId) -> Result<DomainMut<'_, M>, IommuError> {
        match self.domains.get_mut(&domain) {
            Some(domain) => Ok(DomainMut::new(domain)),
            None => Err(IommuError::NoDomain(domain)),
        }
    }

    fn existing(&self, domain: DomainId) -> Result<&Domain<M>, IommuError> {
        self.domains
            .get(&domain)
            .ok_or(IommuError::NoDomain(domain))
    }

    /// Returns the domain that `device` is attached to; `None` if it is blocked or bypasses
    /// translation.
    pub fn attached_to(&self, device: RequesterId) -> Option<DomainId> {
        self.endpoints.get(&device)?.domain
    }

    /// Attaches `device` to `domain` and detaches it from any other. On return, its readers
    /// translate through the domain and hold no earlier translation.
    pub fn attach(&mut self, device: RequesterId, domain: DomainId) -> Result<(), IommuError> {
        may_wait()?;
        self.attach_nosync(device, domain)?;
        self.synchronize();
        Ok(())
    }

    /// Detaches `device` and blocks it. On return, its readers get no translation and hold none.
    pub fn detach(&mut self, device: RequesterId) -> Result<(), IommuError> {
        may_wait()?;
        self.change(device, AttachedDomain::Blocked, None)?;
        self.synchronize();
        Ok(())
    }

    /// Detaches `device` and lets it use physical addresses. On return, its readers hold no earlier
    /// translation.
    pub fn bypass(&mut self, device: RequesterId) -> Result<(), IommuError> {
        may_wait()?;
        self.change(device, AttachedDomain::Bypass, None)?;
        self.synchronize();
        Ok(())
    }

    /// Replaces the memory that physical addresses refer to. On return, no reader can access the
    /// old memory. An offline [`Reader`] still owns a reference until it next goes online.
    pub fn set_memory(&mut self, memory: M) -> Result<(), IommuError> {
        may_wait()?;
        self.memory = Arc::new(memory);
        for attached in self.endpoints.values() {
            let (view, _) = attached.endpoint.view();
            let attachment = view.attachment.clone();
            attached.endpoint.publish(self.view(attachment));
        }
        self.synchronize();
        Ok(())
    }

    /// Like [`attach`](Self::attach), but readers may hold earlier translations until
    /// [`synchronize`](Self::synchronize) returns.
    pub(crate) fn attach_nosync(
        &mut self,
        device: RequesterId,
        domain: DomainId,
    ) -> Result<(), IommuError> {
        let table = Arc::clone(self.existing(domain)?.table());
        if self.attached_to(device) == Some(domain) {
            return Ok(());
        }
        self.change(device, AttachedDomain::Domain(table), Some(domain))
    }

    /// Removes a domain that no endpoint is attached to, even before
    /// [`synchronize`](Self::synchronize). Readers that have not passed a checkpoint keep its table
    /// alive.
    #[cfg(feature = "virtio-iommu")]
    pub(crate) fn drop_domain(&mut self, domain: DomainId) {
        self.domains.remove(&domain);
    }

    /// Publishes a new attachment of `device` to its readers. Some may use the old one until
    /// [`synchronize`](Self::synchronize) returns.
    pub(crate) fn change(
        &mut self,
        device: RequesterId,
        attachment: AttachedDomain,
        domain: Option<DomainId>,
    ) -> Result<(), IommuError> {
        let view = self.view(attachment);
        let attached = self
            .endpoints
            .get_mut(&device)
            .ok_or(IommuError::NoEndpoint(device))?;
        // The new domain lists the endpoint before its readers can walk the table; the old one
        // lists it until they no longer do.
        let before = mem::replace(&mut attached.domain, domain);
        if let Some(new) = domain.and_then(|id| self.domains.get_mut(&id)) {
            new.add(Arc::clone(&attached.endpoint));
        }
        attached.endpoint.publish(view);
        self.changed.push((Arc::clone(&attached.endpoint), before));
        Ok(())
    }

    fn view(&self, attachment: AttachedDomain) -> ReaderView<M> {
        ReaderView {
            attachment,
            memory: Arc::clone(&self.memory),
        }
    }

    /// Returns the QSBR state of all endpoints, including those removed since the last wait.
    fn all_qsbr(&self) -> impl Iterator<Item = &Qsbr> + Clone {
        let present = self.endpoints.values().map(|attached| &attached.endpoint);
        let changed = self.changed.iter().map(|(endpoint, _)| endpoint);
        present.chain(changed).map(|endpoint| endpoint.qsbr())
    }

    /// Waits for the readers of all endpoints, including those removed since the last wait.
    pub(crate) fn synchronize(&mut self) {
        synchronize(self.all_qsbr());
        for (_, domain) in mem::take(&mut self.changed) {
            if let Some((id, domain)) =
                domain.and_then(|id| self.domains.get_mut(&id).map(|d| (id, d)))
            {
                domain.retain(|endpoint| {
                    self.endpoints
                        .get(&endpoint.device())
                        .is_some_and(|attached| {
                            attached.domain == Some(id) && Arc::ptr_eq(&attached.endpoint, endpoint)
                        })
                });
            }
        }
    }
}

/// Checks that this thread may wait for readers.
pub(crate) fn may_wait() -> Result<(), ReadSectionOpen> {
    if guard_count::any_open() {
        Err(ReadSectionOpen)
    } else {
        Ok(())
    }
}

impl<M> Drop for SoftIommu<M> {
    /// Blocks all readers that outlive the unit, from the return of this call on. If the dropping
    /// thread is itself in a read section, it may not wait. Each reader is then blocked from its
    /// next guard on, and slices taken before that guard stay valid until then.
    fn drop(&mut self) {
        for attached in self.endpoints.values() {
            attached
                .endpoint
                .publish(self.view(AttachedDomain::Blocked));
        }
        if may_wait().is_ok() {
            self.synchronize();
        } else {
            start_grace_period(self.all_qsbr());
        }
    }
}
