//! Checks all statements on a device of another implementation, and prints the verdicts.
//!
//! `device.rs` is the device, `adapter.rs` its adapter.

mod adapter;
mod device;

use ringfence_virtio_iommu_conformance::{STATEMENTS, Verdict};

fn main() {
    for statement in STATEMENTS {
        match statement.run(&adapter::make) {
            Verdict::Pass => println!("pass {statement}"),
            Verdict::Fail(reason) => println!("FAIL {statement}: {reason}"),
            Verdict::NotApplicable(reason) => println!("n/a  {statement}: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_statement_fails() {
        let mut not_applicable = Vec::new();
        for statement in STATEMENTS {
            match statement.run(&adapter::make) {
                Verdict::Pass => {}
                Verdict::Fail(reason) => panic!("{statement}: {reason}"),
                Verdict::NotApplicable(_) => not_applicable.push(statement.id),
            }
        }
        let expected = [
            "domain-range",
            "input-range",
            "map-mmio-negotiated",
            "probe-not-offered",
            "fault-count",
            "unmap-outstanding",
            "caps-mappings",
            "caps-domains",
        ];
        assert_eq!(not_applicable, expected);
    }

    #[test]
    fn the_adapter_has_at_most_100_lines() {
        assert!(include_str!("adapter.rs").lines().count() <= 100);
    }
}
