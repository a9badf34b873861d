//! Conformance statements: each holds for this crate's device, called directly and through queues.
//! Each broken device fails its own statements and no other.

mod subjects;

use ringfence_virtio_iommu_conformance::{STATEMENTS, Setup, Subject, Verdict};
use subjects::broken::Broken;
use subjects::direct::Direct;
use subjects::flaws::FLAWS;

fn direct(setup: &Setup) -> Result<Box<dyn Subject>, String> {
    Ok(Box::new(Direct::new(setup)))
}

/// Runs the statement of a test on each correct device.
fn holds(name: &str) {
    let id = name.replace('_', "-");
    let mut all = STATEMENTS.iter();
    let statement = all.find(|statement| statement.id == id);
    let statement = statement.expect("a statement for each test");
    assert_eq!(statement.run(&direct), Verdict::Pass, "{statement}");
    #[cfg(feature = "virtio-queue")]
    {
        let queued = |setup: &Setup| -> Result<Box<dyn Subject>, String> {
            Ok(Box::new(subjects::queued::Queued::new(setup)))
        };
        assert_eq!(
            statement.run(&queued),
            Verdict::Pass,
            "{statement}, over queues"
        );
    }
}

macro_rules! named {
    ($($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                holds(stringify!($name));
            }
        )*

        #[test]
        fn every_statement_has_its_test() {
            let tests = [$(stringify!($name)),*].map(|name| name.replace('_', "-"));
            let ids: Vec<&str> = STATEMENTS.iter().map(|statement| statement.id).collect();
            assert_eq!(tests.as_slice(), ids);
        }
    };
}

named! {
    features_map_unmap,
    features_bypass,
    config_page_size_mask,
    config_bypass_value,
    config_bypass_reset,
    config_bypass_system_reset,
    config_ranges,
    reset_detaches,
    status_ok,
    type_unknown,
    request_short,
    request_no_tail,
    head_reserved,
    tail_reserved,
    failure_used_length,
    unattached_blocked,
    bypass_unattached,
    bypass_domain,
    domain_range,
    input_range,
    attach_reserved,
    attach_flags,
    attach_bypass_flag,
    attach_endpoint,
    attach_effect,
    attach_contradiction,
    attach_rejection,
    attach_move,
    attach_join,
    attach_isolation,
    detach_reserved,
    detach_endpoint,
    detach_domain,
    detach_blocks,
    domain_ends,
    map_translation,
    map_top,
    map_alignment,
    map_overlap,
    map_flags,
    map_mmio,
    map_mmio_negotiated,
    map_domain,
    map_bypass_domain,
    map_write_permission,
    map_read_permission,
    unmap_reserved,
    unmap_domain,
    unmap_bypass_domain,
    unmap_split,
    unmap_split_keeps,
    unmap_gaps,
    unmap_examples,
    unmap_everything,
    probe_reserved,
    probe_endpoint,
    probe_not_offered,
    probe_property_reserved,
    probe_lengths,
    probe_short,
    probe_rest,
    region_reserved,
    region_msi,
    region_overlap,
    region_map,
    region_access,
    fault_reserved,
    fault_flags,
    fault_endpoint,
    fault_split,
    fault_reason,
    fault_address,
    fault_no_buffer,
    fault_count,
    config_other_fields,
    request_complete,
    attach_endpoint_alias,
    map_reversed,
    map_physical_wrap,
    unmap_reversed,
    unmap_outstanding,
    caps_mappings,
    caps_domains,
}

/// Each broken device fails exactly its statements. Each statement has at least one. A deviation
/// that no statement forbids fails none.
#[test]
fn every_check_fails_on_a_flawed_device() {
    let mut wrong = Vec::new();
    let mut uncaught: Vec<&str> = STATEMENTS.iter().map(|statement| statement.id).collect();
    for &(ids, flaw) in FLAWS {
        let make = |setup: &Setup| -> Result<Box<dyn Subject>, String> {
            Ok(Box::new(Broken::new(setup, flaw)))
        };
        let mut failed = Vec::new();
        for statement in STATEMENTS {
            if let Verdict::Fail(_) = statement.run(&make) {
                failed.push(statement.id);
            }
        }
        if failed != ids {
            wrong.push(format!("{flaw:?} breaks {ids:?}, found {failed:?}"));
        }
        uncaught.retain(|id| !ids.contains(id));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(uncaught.is_empty(), "no broken device: {uncaught:?}");
}
