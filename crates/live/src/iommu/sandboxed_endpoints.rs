//! Endpoints whose device runs in a sandboxed process: each is granted the mappings of its domain.
//!
//! A protocol violation by such a process does not affect the guest driver's requests, which
//! succeed. The violating process is killed, so it accesses nothing more, and its device requests a
//! reset.

use std::collections::BTreeMap;

use ringfence_virtio_iommu::{DomainId, EndpointId, Mapping, SinkError};
use vm_memory::GuestMemoryMmap;

use crate::grants::{GrantError, Grants};

/// The grants of each endpoint.
#[derive(Debug, Default)]
pub(crate) struct SandboxedEndpoints {
    endpoints: BTreeMap<EndpointId, Grants>,
}

impl SandboxedEndpoints {
    pub(super) fn add(&mut self, endpoint: EndpointId, grants: Grants) {
        self.endpoints.insert(endpoint, grants);
    }

    pub(super) fn has(&self, endpoint: EndpointId) -> bool {
        self.endpoints.contains_key(&endpoint)
    }

    pub(super) fn get(&mut self, endpoint: EndpointId) -> Option<&mut Grants> {
        self.endpoints.get_mut(&endpoint)
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
        let Some(grants) = self.endpoints.get_mut(&endpoint) else {
            return Ok(());
        };
        grants.unmap_all();
        let mut whole = Ok(());
        for mapping in mappings {
            let granted = grants.map(mapping.iova, mapping.physical, mapping.permissions);
            if granted == Err(GrantError::NoRoom) {
                whole = Err(SinkError::OutOfMemory);
            }
        }
        whole
    }

    /// Adds a mapping for all endpoints of the domain, or for none on an error.
    pub(super) fn map(
        &mut self,
        attached: &BTreeMap<EndpointId, DomainId>,
        domain: DomainId,
        mapping: &Mapping,
    ) -> Result<(), SinkError> {
        let mut failed = None;
        for (_, grants) in self.of(attached, domain) {
            let granted = grants.map(mapping.iova, mapping.physical, mapping.permissions);
            failed = failed.or(granted.err());
        }
        let Some(error) = failed else {
            return Ok(());
        };
        self.unmap(attached, domain, mapping);
        Err(match error {
            GrantError::NoRoom => SinkError::OutOfMemory,
            GrantError::Unfit => SinkError::Unsupported,
        })
    }

    pub(super) fn unmap(
        &mut self,
        attached: &BTreeMap<EndpointId, DomainId>,
        domain: DomainId,
        mapping: &Mapping,
    ) {
        for (_, grants) in self.of(attached, domain) {
            grants.unmap(mapping.iova.start());
        }
    }

    fn of(
        &mut self,
        attached: &BTreeMap<EndpointId, DomainId>,
        domain: DomainId,
    ) -> impl Iterator<Item = (&EndpointId, &mut Grants)> {
        let endpoints = self.endpoints.iter_mut();
        endpoints.filter(move |(endpoint, _)| attached.get(endpoint) == Some(&domain))
    }

    /// Completes the revocations. On `Ok`, no process can access an unmapped page.
    pub(super) fn commit(&mut self) -> Result<(), SinkError> {
        let settled = self.endpoints.values_mut().map(Grants::commit);
        // Commit every process, even after a failure.
        let undead = settled.fold(false, |undead, one| undead | one.is_err());
        if undead {
            return Err(SinkError::CommitFailed);
        }
        Ok(())
    }

    /// Replaces the guest's memory.
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), SinkError> {
        let set = self.endpoints.values_mut();
        let undead = set.fold(false, |undead, grants| {
            undead | grants.set_memory(memory).is_err()
        });
        if undead {
            return Err(SinkError::CommitFailed);
        }
        Ok(())
    }
}
