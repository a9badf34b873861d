//! A sink that records the access of each endpoint, asserts correct use, and fails on request.

use std::collections::BTreeMap;

use ringfence_types::{Access, Iova};
use ringfence_virtio_iommu::{DomainId, EndpointId, Mapping, Sink, SinkError, SinkHandle};

/// The calls that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Begin,
    Create,
    Attach,
    Bypass,
    Map,
    Unmap,
}

/// A call that failed on request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) call: Call,
    /// Number of earlier calls of the same kind in the batch.
    pub(crate) earlier: usize,
    pub(crate) error: SinkError,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndpointAccess {
    Nothing,
    Everything,
    Domain(u32),
}

/// A sink that records its calls and fails on request.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    domains: BTreeMap<u32, BTreeMap<u64, Mapping>>,
    endpoints: BTreeMap<u32, EndpointAccess>,
    in_batch: bool,
    /// Number of fallible calls until one fails: 1 is the next one.
    pub(crate) fail_in: Option<(usize, SinkError)>,
    failure: Option<Failure>,
    calls: Vec<Call>,
    /// Number of fallible calls so far.
    pub(crate) made: usize,
}

impl Recorder {
    fn may_fail(&mut self, call: Call) -> Result<(), SinkError> {
        assert_eq!(
            self.in_batch,
            call != Call::Begin,
            "{call:?} outside a batch"
        );
        let earlier = self.calls.iter().filter(|made| **made == call).count();
        self.calls.push(call);
        self.made += 1;
        if let Some((left, error)) = &mut self.fail_in {
            *left = left.saturating_sub(1);
            if *left == 0 {
                let error = *error;
                self.failure = Some(Failure {
                    call,
                    earlier,
                    error,
                });
                self.fail_in = None;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes the failure since the last call.
    pub(crate) fn failure(&mut self) -> Option<Failure> {
        self.failure.take()
    }

    /// Returns the target of an access of `endpoint` to `iova`.
    pub(crate) fn reaches(&self, endpoint: u32, iova: u64, access: Access) -> Option<u64> {
        match self.endpoints.get(&endpoint)? {
            EndpointAccess::Nothing => None,
            EndpointAccess::Everything => Some(iova),
            EndpointAccess::Domain(domain) => {
                let (_, mapping) = self.domains[domain].range(..=iova).next_back()?;
                let inside = mapping.iova.contains_address(Iova::new(iova));
                (inside && mapping.allows(access))
                    .then(|| iova - mapping.iova.start().get() + mapping.physical.get())
            }
        }
    }

    fn is_used(&self, domain: u32) -> bool {
        self.endpoints
            .values()
            .any(|reach| *reach == EndpointAccess::Domain(domain))
    }
}

impl SinkHandle for Recorder {
    type Handle<'s>
        = &'s mut Self
    where
        Self: 's;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl Sink for Recorder {
    fn begin(&mut self) -> Result<(), SinkError> {
        self.calls.clear();
        self.may_fail(Call::Begin)?;
        self.in_batch = true;
        Ok(())
    }

    fn create(&mut self, domain: DomainId) -> Result<(), SinkError> {
        self.may_fail(Call::Create)?;
        let before = self.domains.insert(domain.get(), BTreeMap::new());
        assert_eq!(before, None, "domain {domain} is there");
        Ok(())
    }

    fn destroy(&mut self, domain: DomainId) {
        assert!(self.in_batch);
        assert!(
            !self.is_used(domain.get()),
            "domain {domain} has an endpoint"
        );
        let before = self.domains.remove(&domain.get());
        assert!(before.is_some(), "domain {domain} is not there");
    }

    fn attach(
        &mut self,
        endpoint: EndpointId,
        domain: DomainId,
        mappings: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError> {
        self.may_fail(Call::Attach)?;
        let known: Vec<Mapping> = self.domains[&domain.get()].values().copied().collect();
        assert_eq!(mappings.collect::<Vec<_>>(), known);
        self.endpoints
            .insert(endpoint.get(), EndpointAccess::Domain(domain.get()));
        Ok(())
    }

    fn bypass(&mut self, endpoint: EndpointId) -> Result<(), SinkError> {
        self.may_fail(Call::Bypass)?;
        self.endpoints
            .insert(endpoint.get(), EndpointAccess::Everything);
        Ok(())
    }

    fn block(&mut self, endpoint: EndpointId) {
        assert!(self.in_batch);
        self.endpoints
            .insert(endpoint.get(), EndpointAccess::Nothing);
    }

    fn map(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        self.may_fail(Call::Map)?;
        assert!(mapping.physical_range().is_some());
        let mappings = self.domains.get_mut(&domain.get()).expect("a domain");
        assert!(
            !mappings
                .values()
                .any(|other| other.iova.overlaps(&mapping.iova)),
            "{mapping:?} overlaps"
        );
        mappings.insert(mapping.iova.start().get(), *mapping);
        Ok(())
    }

    fn unmap(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        self.may_fail(Call::Unmap)?;
        let mappings = self.domains.get_mut(&domain.get()).expect("a domain");
        let before = mappings.remove(&mapping.iova.start().get());
        assert_eq!(before, Some(*mapping));
        Ok(())
    }

    fn commit(&mut self) -> Result<(), SinkError> {
        assert!(self.in_batch);
        self.in_batch = false;
        Ok(())
    }
}
