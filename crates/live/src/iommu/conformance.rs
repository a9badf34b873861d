//! The conformance statements of virtio-iommu over the sink of live guests.

use ringfence_virtio_iommu_conformance::{STATEMENTS, Setup, Subject, Verdict};

use super::unmap_history::GuestIommuSink;

#[path = "../../../softiommu/tests/subject/mod.rs"]
mod subject;

use subject::Unit;

#[test]
fn every_statement_holds_over_the_sink_of_live_guests() {
    for statement in STATEMENTS {
        let verdict = statement.run(&|setup: &Setup| -> Result<Box<dyn Subject>, String> {
            Ok(Box::new(Unit::new(setup, GuestIommuSink::new, |sink| {
                &sink.inner
            })))
        });
        assert_eq!(verdict, Verdict::Pass, "{statement}");
    }
}
