//! The software IOMMU, and what was unmapped last: so that an access that is stopped can be told a stale one from one that never had a
//! mapping.

use std::collections::{BTreeMap, VecDeque};

use ringfence_softiommu::IommuSink;
use ringfence_types::IovaRange;
use ringfence_virtio_iommu::{
    Denied, DeniedReason, DomainId, EndpointId, Mapping, Sink, SinkError, SinkHandle,
};

use super::apart::Apart;
use super::assigned::Assigned;

/// Mappings that are remembered after they are gone, of all domains. An access that comes later than so many unmaps counts as one that never
/// had a mapping.
const REMEMBERED: usize = 4096;

/// The sink of the guest's IOMMU.
pub(crate) struct Watched<M> {
    pub(super) inner: IommuSink<M>,
    /// Endpoints whose device is a process of its own.
    pub(super) apart: Apart,
    /// Endpoints that the model of the hardware translates.
    pub(super) assigned: Assigned,
    attached: BTreeMap<EndpointId, DomainId>,
    gone: VecDeque<(DomainId, IovaRange)>,
    /// An endpoint was attached to more than its device has room for.
    short: bool,
}

impl<M> Watched<M> {
    pub(super) fn new(inner: IommuSink<M>) -> Self {
        Self {
            inner,
            apart: Apart::default(),
            assigned: Assigned::default(),
            attached: BTreeMap::new(),
            gone: VecDeque::new(),
            short: false,
        }
    }

    /// Whether an endpoint lacks mappings of its domain, for want of room: such accesses fault.
    pub(super) fn is_short(&self) -> bool {
        self.short
    }

    /// Whether an access was stopped at an address whose mapping was taken away.
    pub(super) fn is_stale(&self, denied: &Denied) -> bool {
        // What is not mapped now and was once, was unmapped since, however often it was mapped in between.
        denied.reason == DeniedReason::NotMapped
            && self.attached.get(&denied.endpoint).is_some_and(|domain| {
                let mut gone = self.gone.iter();
                gone.any(|(of, range)| of == domain && range.contains_address(denied.iova))
            })
    }
}

impl<M> SinkHandle for Watched<M> {
    type Handle<'s>
        = &'s mut Self
    where
        Self: 's;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl<M> Sink for Watched<M> {
    fn begin(&mut self) -> Result<(), SinkError> {
        self.inner.begin()
    }

    fn create(&mut self, domain: DomainId) -> Result<(), SinkError> {
        self.inner.create(domain)
    }

    /// Another domain that gets its number has nothing to do with it.
    fn destroy(&mut self, domain: DomainId) {
        self.inner.destroy(domain);
        self.gone.retain(|(of, _)| *of != domain);
    }

    fn attach(
        &mut self,
        endpoint: EndpointId,
        domain: DomainId,
        mappings: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError> {
        let mappings: Vec<Mapping> = mappings.collect();
        self.inner
            .attach(endpoint, domain, &mut mappings.iter().copied())?;
        self.attached.insert(endpoint, domain);
        let apart = self.apart.attach(endpoint, &mappings);
        let assigned = self.assigned.attach(endpoint, &mappings);
        self.short |= apart.is_err() || assigned.is_err();
        Ok(())
    }

    fn bypass(&mut self, endpoint: EndpointId) -> Result<(), SinkError> {
        // All of memory at once is what a process of its own is there to prevent; and what the hardware translates is mapped by somebody.
        if self.apart.has(endpoint) || self.assigned.has(endpoint) {
            return Err(SinkError::Unsupported);
        }
        self.inner.bypass(endpoint)?;
        self.attached.remove(&endpoint);
        Ok(())
    }

    fn block(&mut self, endpoint: EndpointId) {
        self.inner.block(endpoint);
        self.attached.remove(&endpoint);
        // Of nothing there is not too much.
        let _ = self.apart.attach(endpoint, &[]);
        self.assigned.block(endpoint);
    }

    fn map(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        self.inner.map(domain, mapping)?;
        let granted = self.apart.map(&self.attached, domain, mapping);
        let reached = granted.and_then(|()| {
            let reached = self.assigned.map(&self.attached, domain, mapping);
            reached.inspect_err(|_| self.apart.unmap(&self.attached, domain, mapping))
        });
        reached.or_else(|error| self.inner.unmap(domain, mapping).and(Err(error)))
    }

    fn unmap(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        self.inner.unmap(domain, mapping)?;
        self.apart.unmap(&self.attached, domain, mapping);
        self.assigned.unmap(&self.attached, domain, mapping);
        if self.gone.len() >= REMEMBERED {
            self.gone.pop_front();
        }
        self.gone.push_back((domain, mapping.iova));
        Ok(())
    }

    fn commit(&mut self) -> Result<(), SinkError> {
        self.inner.commit()?;
        self.assigned.settle()?;
        self.apart.settle()
    }
}
