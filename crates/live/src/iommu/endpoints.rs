//! Endpoints whose device has a separate table, which receives the mappings of its domain.

use std::collections::BTreeMap;

use ringfence_types::Iova;
use ringfence_virtio_iommu::{DomainId, EndpointId, Mapping, SinkError};
use vm_memory::GuestMemoryMmap;

/// The table of an endpoint.
pub(super) trait EndpointTable {
    /// Replaces all mappings with these. Mappings without room are left out, and accesses to them
    /// fault.
    ///
    /// # Errors
    /// A mapping had no room.
    fn replace(&mut self, mappings: &[Mapping]) -> Result<(), SinkError>;

    /// Removes all mappings.
    fn block(&mut self);

    /// Adds a mapping.
    fn map(&mut self, mapping: &Mapping) -> Result<(), SinkError>;

    /// Removes the mapping that begins at `start`.
    fn unmap(&mut self, start: Iova);

    /// Completes the unmaps. On `Ok`, the device cannot access an unmapped page.
    fn commit(&mut self) -> Result<(), SinkError>;

    /// Replaces the guest's memory.
    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), SinkError>;
}

/// The table of each endpoint.
#[derive(Debug)]
pub(super) struct Endpoints<T>(BTreeMap<EndpointId, T>);

impl<T> Default for Endpoints<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: EndpointTable> Endpoints<T> {
    pub(super) fn add(&mut self, endpoint: EndpointId, table: T) {
        self.0.insert(endpoint, table);
    }

    pub(super) fn has(&self, endpoint: EndpointId) -> bool {
        self.0.contains_key(&endpoint)
    }

    pub(super) fn get(&mut self, endpoint: EndpointId) -> Option<&mut T> {
        self.0.get_mut(&endpoint)
    }

    /// Replaces the endpoint's mappings with these.
    ///
    /// # Errors
    /// As for [`EndpointTable::replace`].
    pub(super) fn attach(
        &mut self,
        endpoint: EndpointId,
        mappings: &[Mapping],
    ) -> Result<(), SinkError> {
        match self.get(endpoint) {
            Some(table) => table.replace(mappings),
            None => Ok(()),
        }
    }

    /// Removes all mappings of the endpoint.
    pub(super) fn block(&mut self, endpoint: EndpointId) {
        if let Some(table) = self.get(endpoint) {
            table.block();
        }
    }

    /// Adds a mapping for all endpoints of the domain, or for none on an error.
    pub(super) fn map(
        &mut self,
        attached: &BTreeMap<EndpointId, DomainId>,
        domain: DomainId,
        mapping: &Mapping,
    ) -> Result<(), SinkError> {
        let mapped = self.of(attached, domain).map(|table| table.map(mapping));
        let all = mapped.fold(Ok(()), Result::and);
        all.inspect_err(|_| self.unmap(attached, domain, mapping))
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
    ) -> impl Iterator<Item = &mut T> {
        let endpoints = self.0.iter_mut();
        let of = endpoints.filter(move |(endpoint, _)| attached.get(endpoint) == Some(&domain));
        of.map(|(_, table)| table)
    }

    /// Commits every table, even after a failure.
    pub(super) fn commit(&mut self) -> Result<(), SinkError> {
        let committed = self.0.values_mut().map(T::commit);
        committed.fold(Ok(()), Result::and)
    }

    /// Replaces the guest's memory in every table, even after a failure.
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), SinkError> {
        let tables = self.0.values_mut();
        let set = tables.map(|table| table.set_memory(memory));
        set.fold(Ok(()), Result::and)
    }
}
