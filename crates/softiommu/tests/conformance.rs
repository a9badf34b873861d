//! The conformance statements of virtio-iommu, over a device whose sink is the unit.
#![cfg(feature = "virtio-iommu")]

mod subject;

use ringfence_softiommu::IommuSink;
use ringfence_virtio_iommu::{DomainId, EndpointId, Mapping, Sink, SinkError, SinkHandle};
use ringfence_virtio_iommu_conformance::{STATEMENTS, Setup, Statement, Subject, Verdict};

use subject::Unit;

/// The unit as a sink, or a defective one that does not wait for readers.
struct UnitSink {
    unit: IommuSink<()>,
    /// Defect: the reply does not wait.
    hasty: bool,
}

impl SinkHandle for UnitSink {
    type Handle<'s>
        = &'s mut Self
    where
        Self: 's;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl Sink for UnitSink {
    fn begin(&mut self) -> Result<(), SinkError> {
        self.unit.begin()
    }
    fn create(&mut self, domain: DomainId) -> Result<(), SinkError> {
        self.unit.create(domain)
    }
    fn destroy(&mut self, domain: DomainId) {
        self.unit.destroy(domain);
    }
    fn attach(
        &mut self,
        endpoint: EndpointId,
        domain: DomainId,
        mappings: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError> {
        self.unit.attach(endpoint, domain, mappings)
    }
    fn bypass(&mut self, endpoint: EndpointId) -> Result<(), SinkError> {
        self.unit.bypass(endpoint)
    }
    fn block(&mut self, endpoint: EndpointId) {
        self.unit.block(endpoint);
    }
    fn map(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        self.unit.map(domain, mapping)
    }
    fn unmap(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        self.unit.unmap(domain, mapping)
    }
    fn commit(&mut self) -> Result<(), SinkError> {
        if self.hasty {
            return Ok(());
        }
        self.unit.commit()
    }
}

fn run(statement: &Statement, hasty: bool) -> Verdict {
    statement.run(&|setup: &Setup| -> Result<Box<dyn Subject>, String> {
        let sink = |unit| UnitSink { unit, hasty };
        Ok(Box::new(Unit::new(setup, sink, |sink| &sink.unit)))
    })
}

#[test]
fn every_statement_holds_over_the_unit() {
    for statement in STATEMENTS {
        assert_eq!(run(statement, false), Verdict::Pass, "{statement}");
    }
}

/// A unit that does not wait for its readers fails one statement and no other.
#[test]
fn a_reply_that_does_not_wait_is_seen() {
    for statement in STATEMENTS {
        let fails = matches!(run(statement, true), Verdict::Fail(_));
        assert_eq!(fails, statement.id == "unmap-outstanding", "{statement}");
    }
}
