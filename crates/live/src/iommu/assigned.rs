//! Endpoints that the hardware model translates: each has its own table, which receives its
//! domain's mappings.

use std::collections::BTreeMap;

use ringfence_virtio_iommu::{DomainId, EndpointId, Mapping, SinkError};
use vm_memory::GuestMemoryMmap;

use crate::assigned::{AssignedTable, MapFailure};

/// The table of each endpoint.
#[derive(Debug, Default)]
pub(crate) struct AssignedEndpoints {
    endpoints: BTreeMap<EndpointId, AssignedTable>,
}

impl AssignedEndpoints {
    pub(super) fn add(&mut self, endpoint: EndpointId, mapped: AssignedTable) {
        self.endpoints.insert(endpoint, mapped);
    }

    pub(super) fn has(&self, endpoint: EndpointId) -> bool {
        self.endpoints.contains_key(&endpoint)
    }

    /// Replaces the endpoint's mappings with these. Mappings without room are left out, and
    /// accesses to them fault.
    ///
    /// # Errors
    /// A mapping had no room.
    pub(super) fn attach(
        &mut self,
        endpoint: EndpointId,
        mappings: &[Mapping],
    ) -> Result<(), SinkError> {
        let Some(table) = self.endpoints.get_mut(&endpoint) else {
            return Ok(());
        };
        table.detach();
        table.unmap_all();
        let mut whole = Ok(());
        for mapping in mappings {
            let mapped = table.map(mapping.iova, mapping.physical.get(), mapping.permissions);
            // An address outside guest memory is accessible nowhere else either.
            if let Err(MapFailure::NoRoom | MapFailure::Failed) = mapped {
                whole = Err(SinkError::OutOfMemory);
            }
        }
        table.attach();
        whole
    }

    /// Removes all mappings of the endpoint.
    pub(super) fn block(&mut self, endpoint: EndpointId) {
        if let Some(table) = self.endpoints.get_mut(&endpoint) {
            table.detach();
            table.unmap_all();
        }
    }

    /// Adds a mapping for all endpoints of the domain, or for none on an error.
    pub(super) fn map(
        &mut self,
        attached: &BTreeMap<EndpointId, DomainId>,
        domain: DomainId,
        mapping: &Mapping,
    ) -> Result<(), SinkError> {
        let mut failed = None;
        for table in self.of(attached, domain) {
            let mapped = table.map(mapping.iova, mapping.physical.get(), mapping.permissions);
            failed = failed.or(mapped.err());
        }
        let Some(error) = failed else {
            return Ok(());
        };
        self.unmap(attached, domain, mapping);
        Err(match error {
            MapFailure::NotMemory => SinkError::BadAddress(mapping.iova),
            MapFailure::NoRoom => SinkError::OutOfMemory,
            MapFailure::Failed => SinkError::Failed,
        })
    }

    pub(super) fn unmap(
        &mut self,
        attached: &BTreeMap<EndpointId, DomainId>,
        domain: DomainId,
        mapping: &Mapping,
    ) {
        for table in self.of(attached, domain) {
            table.unmap(mapping.iova.start());
        }
    }

    fn of(
        &mut self,
        attached: &BTreeMap<EndpointId, DomainId>,
        domain: DomainId,
    ) -> impl Iterator<Item = &mut AssignedTable> {
        let endpoints = self.endpoints.iter_mut();
        let of = endpoints.filter(move |(endpoint, _)| attached.get(endpoint) == Some(&domain));
        of.map(|(_, table)| table)
    }

    /// Completes the invalidations. On `Ok`, no endpoint can access an unmapped page.
    pub(super) fn commit(&mut self) -> Result<(), SinkError> {
        let settled = self.endpoints.values_mut().map(AssignedTable::commit);
        // Commit every table, even after a failure.
        let unsettled = settled.fold(false, |unsettled, one| unsettled | one.is_err());
        if unsettled {
            return Err(SinkError::CommitFailed);
        }
        Ok(())
    }

    /// Replaces the guest's memory.
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        for table in self.endpoints.values_mut() {
            table.set_memory(memory);
        }
    }
}
