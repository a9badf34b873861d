//! The unit: its endpoints, its domains, who is attached to what, and the memory behind it all.

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

/// How much of everything there can be. A guest decides how much of it is used; none of it grows
/// beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SoftIommuLimits {
    /// Width of every domain's table.
    pub width: Width,
    /// Tables of a domain, 4 KiB each, the root included. One of the last level maps 2 MiB.
    pub tables: usize,
    /// Domains.
    pub domains: usize,
    /// Endpoints.
    pub endpoints: usize,
    /// Readers of an endpoint: one for each thread that accesses memory for it.
    pub readers: usize,
}

impl Default for SoftIommuLimits {
    /// 48 bits; 16 MiB of tables a domain, which map 8 GiB; 64 domains; 64 endpoints with 32
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

/// A software IOMMU over the memory `M`, from the side that changes mappings. It is one writer's,
/// by `&mut`; readers need no part of it once they exist.
///
/// An endpoint is denied everything until it is attached to a domain or told to bypass.
pub struct SoftIommu<M> {
    limits: SoftIommuLimits,
    memory: Arc<M>,
    endpoints: BTreeMap<RequesterId, Attached<M>>,
    domains: BTreeMap<DomainId, Domain<M>>,
    /// Endpoints that have changed since the last wait for readers, and the domain they were
    /// attached to.
    changed: Vec<(Arc<Endpoint<M>>, Option<DomainId>)>,
}

/// An endpoint, and to which domain it is attached.
struct Attached<M> {
    endpoint: Arc<Endpoint<M>>,
    domain: Option<DomainId>,
}

impl<M> SoftIommu<M> {
    /// A unit without endpoints and domains, over `memory`.
    pub fn new(limits: SoftIommuLimits, memory: M) -> Self {
        Self {
            limits,
            memory: Arc::new(memory),
            endpoints: BTreeMap::new(),
            domains: BTreeMap::new(),
            changed: Vec::new(),
        }
    }

    /// Its limits.
    pub fn limits(&self) -> &SoftIommuLimits {
        &self.limits
    }

    /// Adds an endpoint. It is denied everything.
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

    /// Removes an endpoint. When this returns, its readers are denied everything for good.
    pub fn remove_endpoint(&mut self, device: RequesterId) -> Result<(), IommuError> {
        self.detach(device)?;
        self.endpoints.remove(&device);
        Ok(())
    }

    /// A reader for one thread that accesses memory for `device`.
    pub fn reader(&self, device: RequesterId) -> Result<Reader<M>, IommuError> {
        let attached = self
            .endpoints
            .get(&device)
            .ok_or(IommuError::NoEndpoint(device))?;
        Reader::new(Arc::clone(&attached.endpoint)).ok_or(IommuError::TooManyReaders(device))
    }

    /// Makes an empty domain.
    pub fn create_domain(&mut self, domain: DomainId) -> Result<DomainMut<'_, M>, IommuError> {
        if self.domains.len() >= self.limits.domains {
            return Err(IommuError::TooManyDomains(domain));
        }
        let (width, tables) = (self.limits.width, self.limits.tables);
        match self.domains.entry(domain) {
            Entry::Occupied(_) => Err(IommuError::DomainExists(domain)),
            Entry::Vacant(free) => {
                let made = Domain::new(domain, width, tables);
                let made = free.insert(made.ok_or(IommuError::NoMemory(domain))?);
                Ok(DomainMut::new(made))
            }
        }
    }

    /// Removes a domain that no endpoint is attached to, and its mappings.
    pub fn remove_domain(&mut self, domain: DomainId) -> Result<(), IommuError> {
        if self.existing(domain)?.has_endpoints() {
            return Err(IommuError::DomainInUse(domain));
        }
        self.domains.remove(&domain);
        Ok(())
    }

    /// The domain, to map and unmap in. What comes back is a handle: the domain itself stays in its
    /// unit, which waits for the domain's readers.
    ///
    /// ```compile_fail,E0308
    /// use ringfence_softiommu::SoftIommu;
    /// use ringfence_types::DomainId;
    ///
    /// // The domains of two units cannot change places.
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

    /// To which domain `device` is attached; `None` if it is blocked or bypasses.
    pub fn attached_to(&self, device: RequesterId) -> Option<DomainId> {
        self.endpoints.get(&device)?.domain
    }

    /// Attaches `device` to `domain`, from wherever it is. When this returns, its readers translate
    /// by the domain, and nothing that they got by what was before is left.
    pub fn attach(&mut self, device: RequesterId, domain: DomainId) -> Result<(), IommuError> {
        may_wait()?;
        self.attach_nosync(device, domain)?;
        self.synchronize();
        Ok(())
    }

    /// Detaches `device` from whatever it is attached to, and denies it everything. When this
    /// returns, no translation is to be had, and none that its readers got is left.
    pub fn detach(&mut self, device: RequesterId) -> Result<(), IommuError> {
        may_wait()?;
        self.change(device, AttachedDomain::Blocked, None)?;
        self.synchronize();
        Ok(())
    }

    /// Lets `device` use physical addresses, from wherever it is attached.
    pub fn bypass(&mut self, device: RequesterId) -> Result<(), IommuError> {
        may_wait()?;
        self.change(device, AttachedDomain::Bypass, None)?;
        self.synchronize();
        Ok(())
    }

    /// Puts other memory behind all translations. When this returns, no reader holds anything of
    /// the memory before.
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

    /// As [`attach`](Self::attach), without its promise until [`synchronize`](Self::synchronize)
    /// has returned.
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

    /// Removes a domain that no endpoint is attached to any more, settled or not: readers that have
    /// not noticed keep its table.
    #[cfg(feature = "virtio-iommu")]
    pub(crate) fn drop_domain(&mut self, domain: DomainId) {
        self.domains.remove(&domain);
    }

    /// Shows the readers of `device` something else. Some may see what was before until
    /// [`synchronize`](Self::synchronize) has returned.
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
        // The new domain knows of the endpoint before its readers walk the table, the old one until
        // they no longer do.
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

    /// The gates of all endpoints, and of those that were removed since the last wait.
    fn all_qsbr(&self) -> impl Iterator<Item = &Qsbr> + Clone {
        let present = self.endpoints.values().map(|attached| &attached.endpoint);
        let changed = self.changed.iter().map(|(endpoint, _)| endpoint);
        present.chain(changed).map(|endpoint| endpoint.qsbr())
    }

    /// Waits for the readers of all endpoints, those that were removed since the last wait
    /// included.
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

/// Whether this thread may wait for readers.
pub(crate) fn may_wait() -> Result<(), ReadSectionOpen> {
    if guard_count::any_open() {
        Err(ReadSectionOpen)
    } else {
        Ok(())
    }
}

impl<M> Drop for SoftIommu<M> {
    /// Readers that outlive the unit are denied everything: when this returns, or where the thread
    /// that drops it is in a burst itself and may not wait, from the next pin of each reader on.
    /// Slices that were taken before that pin stay good until then.
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
