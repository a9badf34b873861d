//! The mappings of each endpoint, as the record of DMAs shows them.

mod ending;

use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence_types::{Iova, RequesterId};
use ringfence_virtio_iommu::{DomainId, EndpointId, Mapping};

use self::ending::Ending;
use crate::record::DmaRecord;

/// Domain of each attached endpoint.
type Attached = BTreeMap<EndpointId, DomainId>;

/// Writes the maps and unmaps of a sink's changes to the record, one line for each endpoint.
///
/// A map is written before the change, so that no access precedes it. An unmap is written at the
/// commit, when no access uses the mapping any more.
#[derive(Debug)]
pub(super) struct RecordedMappings {
    record: Arc<DmaRecord>,
    domains: BTreeMap<DomainId, BTreeMap<Iova, Mapping>>,
    /// Mappings that end with the next commit.
    ending: Ending,
}

impl RecordedMappings {
    pub(super) fn new(record: Arc<DmaRecord>) -> Self {
        Self {
            record,
            domains: BTreeMap::new(),
            ending: Ending::default(),
        }
    }

    /// Adds the mappings of an endpoint that is about to be attached to `domain`.
    pub(super) fn attach(
        &mut self,
        attached: &Attached,
        endpoint: EndpointId,
        domain: DomainId,
        mappings: &[Mapping],
    ) {
        self.detach(attached, endpoint);
        let of_domain = mappings.iter().map(|one| (one.iova.start(), *one));
        self.domains.insert(domain, of_domain.collect());
        for mapping in mappings {
            self.begin(endpoint, mapping);
        }
    }

    /// Undoes [`attach`](Self::attach). The record shows the endpoint's mappings a second time.
    pub(super) fn undo_attach(
        &mut self,
        attached: &Attached,
        endpoint: EndpointId,
        mappings: &[Mapping],
    ) {
        let of = device(endpoint);
        self.ending.extend(mappings.iter().map(|one| (of, *one)));
        let domain = attached.get(&endpoint);
        let before = domain.and_then(|domain| self.domains.get(domain));
        let before: Vec<Mapping> = before
            .into_iter()
            .flat_map(BTreeMap::values)
            .copied()
            .collect();
        for mapping in &before {
            self.begin(endpoint, mapping);
        }
    }

    /// Removes the mappings of an endpoint that is attached so far.
    pub(super) fn detach(&mut self, attached: &Attached, endpoint: EndpointId) {
        let domain = attached.get(&endpoint);
        let mappings = domain.and_then(|domain| self.domains.get(domain));
        let of = device(endpoint);
        let ended = mappings.into_iter().flat_map(BTreeMap::values);
        self.ending.extend(ended.map(|mapping| (of, *mapping)));
    }

    pub(super) fn destroy(&mut self, domain: DomainId) {
        self.domains.remove(&domain);
    }

    /// Adds a mapping that is about to begin.
    pub(super) fn map(&mut self, attached: &Attached, domain: DomainId, mapping: &Mapping) {
        for endpoint in endpoints(attached, domain) {
            self.begin(endpoint, mapping);
        }
        let mappings = self.domains.entry(domain).or_default();
        mappings.insert(mapping.iova.start(), *mapping);
    }

    pub(super) fn unmap(&mut self, attached: &Attached, domain: DomainId, mapping: &Mapping) {
        let ended = endpoints(attached, domain).map(|endpoint| (device(endpoint), *mapping));
        self.ending.extend(ended);
        if let Some(mappings) = self.domains.get_mut(&domain) {
            mappings.remove(&mapping.iova.start());
        }
    }

    /// Writes the mappings that have ended.
    pub(super) fn commit(&mut self) {
        for (device, mapping) in self.ending.drain() {
            self.record.unmap(device, &mapping);
        }
    }

    fn begin(&mut self, endpoint: EndpointId, mapping: &Mapping) {
        let device = device(endpoint);
        // A batch that maps an address again ends its old mapping first. An access that still uses
        // the old one then follows the line of the new one.
        if self.ending.overlaps(device, &mapping.iova) {
            self.commit();
        }
        self.record.map(device, mapping);
    }
}

fn endpoints(attached: &Attached, domain: DomainId) -> impl Iterator<Item = EndpointId> {
    let of = attached.iter().filter(move |(_, of)| **of == domain);
    of.map(|(endpoint, _)| *endpoint)
}

/// Endpoints of this IOMMU are numbered by their requester IDs.
fn device(endpoint: EndpointId) -> RequesterId {
    RequesterId::new(endpoint.get() as u16)
}

#[cfg(test)]
mod tests;
