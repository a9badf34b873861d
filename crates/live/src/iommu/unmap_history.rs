//! The software IOMMU with a history of recent unmaps. The history distinguishes an access to a
//! stale mapping from an access to an address that was never mapped.

use std::collections::{BTreeMap, VecDeque};

use ringfence_softiommu::IommuSink;
use ringfence_types::IovaRange;
use ringfence_virtio_iommu::{
    DomainId, EndpointId, Mapping, Sink, SinkError, SinkHandle, TranslationFault,
    TranslationFaultReason,
};

use super::endpoints::Endpoints;
use super::recorded_mappings::RecordedMappings;
use crate::assigned::AssignedTable;
use crate::grants::Grants;

/// Unmaps in the history, over all domains. A stale access after this many further unmaps counts as
/// never mapped.
const UNMAPS_KEPT: usize = 4096;

/// The sink of the guest's IOMMU.
pub(crate) struct GuestIommuSink<M> {
    pub(super) inner: IommuSink<M>,
    /// Endpoints whose device runs in a sandboxed process.
    pub(super) sandboxed: Endpoints<Grants>,
    /// Endpoints that the hardware model translates.
    pub(super) assigned: Endpoints<AssignedTable>,
    /// Record of the mappings, if DMAs are recorded.
    pub(super) recorded: Option<RecordedMappings>,
    attached: BTreeMap<EndpointId, DomainId>,
    recently_unmapped: VecDeque<(DomainId, IovaRange)>,
    /// True if an endpoint was attached to a domain with more mappings than its device has room
    /// for.
    incomplete: bool,
}

impl<M> GuestIommuSink<M> {
    pub(super) fn new(inner: IommuSink<M>) -> Self {
        Self {
            inner,
            sandboxed: Endpoints::default(),
            assigned: Endpoints::default(),
            recorded: None,
            attached: BTreeMap::new(),
            recently_unmapped: VecDeque::new(),
            incomplete: false,
        }
    }

    /// Returns true if an endpoint lacks mappings of its domain for want of room. Accesses to them
    /// fault.
    pub(super) fn is_incomplete(&self) -> bool {
        self.incomplete
    }

    /// Returns true if the access was stopped at an address that was mapped earlier.
    pub(super) fn is_stale(&self, denied: &TranslationFault) -> bool {
        // An address in the history that is not mapped now was unmapped last, even if it was
        // remapped in between.
        denied.reason == TranslationFaultReason::NotMapped
            && self.attached.get(&denied.endpoint).is_some_and(|domain| {
                let mut ranges = self.recently_unmapped.iter();
                ranges.any(|(of, range)| of == domain && range.contains_address(denied.iova))
            })
    }
}

impl<M> GuestIommuSink<M> {
    /// Maps for software and for every endpoint with a table of its own, or for none on an error.
    fn map_everywhere(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        self.inner.map(domain, mapping)?;
        let granted = self.sandboxed.map(&self.attached, domain, mapping);
        let reached = granted.and_then(|()| {
            let reached = self.assigned.map(&self.attached, domain, mapping);
            reached.inspect_err(|_| self.sandboxed.unmap(&self.attached, domain, mapping))
        });
        reached.or_else(|error| self.inner.unmap(domain, mapping).and(Err(error)))
    }

    /// Records the end of an endpoint's mappings.
    fn end_recorded(&mut self, endpoint: EndpointId) {
        if let Some(recorded) = &mut self.recorded {
            recorded.detach(&self.attached, endpoint);
        }
    }
}

impl<M> SinkHandle for GuestIommuSink<M> {
    type Handle<'s>
        = &'s mut Self
    where
        Self: 's;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl<M> Sink for GuestIommuSink<M> {
    fn begin(&mut self) -> Result<(), SinkError> {
        self.inner.begin()
    }

    fn create(&mut self, domain: DomainId) -> Result<(), SinkError> {
        self.inner.create(domain)
    }

    /// Also drops the domain's history: a later domain with the same ID is unrelated.
    fn destroy(&mut self, domain: DomainId) {
        self.inner.destroy(domain);
        if let Some(recorded) = &mut self.recorded {
            recorded.destroy(domain);
        }
        self.recently_unmapped.retain(|(of, _)| *of != domain);
    }

    fn attach(
        &mut self,
        endpoint: EndpointId,
        domain: DomainId,
        mappings: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError> {
        let mappings: Vec<Mapping> = mappings.collect();
        if let Some(recorded) = &mut self.recorded {
            recorded.attach(&self.attached, endpoint, domain, &mappings);
        }
        let attached = self
            .inner
            .attach(endpoint, domain, &mut mappings.iter().copied());
        if let (Err(_), Some(recorded)) = (attached, &mut self.recorded) {
            recorded.undo_attach(&self.attached, endpoint, &mappings);
        }
        attached?;
        self.attached.insert(endpoint, domain);
        let sandboxed = self.sandboxed.attach(endpoint, &mappings);
        let assigned = self.assigned.attach(endpoint, &mappings);
        self.incomplete |= sandboxed.is_err() || assigned.is_err();
        Ok(())
    }

    fn bypass(&mut self, endpoint: EndpointId) -> Result<(), SinkError> {
        // Bypass would give a sandboxed process all of memory, and the hardware model translates
        // only mapped addresses.
        if self.sandboxed.has(endpoint) || self.assigned.has(endpoint) {
            return Err(SinkError::Unsupported);
        }
        self.inner.bypass(endpoint)?;
        self.end_recorded(endpoint);
        self.attached.remove(&endpoint);
        Ok(())
    }

    fn block(&mut self, endpoint: EndpointId) {
        self.inner.block(endpoint);
        self.end_recorded(endpoint);
        self.attached.remove(&endpoint);
        self.sandboxed.block(endpoint);
        self.assigned.block(endpoint);
    }

    fn map(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        if let Some(recorded) = &mut self.recorded {
            recorded.map(&self.attached, domain, mapping);
        }
        let mapped = self.map_everywhere(domain, mapping);
        if let (Err(_), Some(recorded)) = (mapped, &mut self.recorded) {
            recorded.unmap(&self.attached, domain, mapping);
        }
        mapped
    }

    fn unmap(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        self.inner.unmap(domain, mapping)?;
        if let Some(recorded) = &mut self.recorded {
            recorded.unmap(&self.attached, domain, mapping);
        }
        self.sandboxed.unmap(&self.attached, domain, mapping);
        self.assigned.unmap(&self.attached, domain, mapping);
        if self.recently_unmapped.len() >= UNMAPS_KEPT {
            self.recently_unmapped.pop_front();
        }
        self.recently_unmapped.push_back((domain, mapping.iova));
        Ok(())
    }

    fn commit(&mut self) -> Result<(), SinkError> {
        self.inner.commit()?;
        self.assigned.commit()?;
        self.sandboxed.commit()?;
        if let Some(recorded) = &mut self.recorded {
            recorded.commit();
        }
        Ok(())
    }
}
