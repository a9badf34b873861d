//! Conformance statements: each holds for this crate's device, called directly and through queues.
//! For each statement, a broken device fails it and no other statement.

mod subjects;

use ringfence_virtio_iommu_conformance::{STATEMENTS, Setup, Subject, Verdict};
use subjects::broken::Broken;
use subjects::direct::Direct;
use subjects::flaws::FLAWS;

fn direct(setup: &Setup) -> Option<Box<dyn Subject>> {
    Some(Box::new(Direct::new(setup)))
}

/// Runs statement `number` on each correct device.
fn holds(number: usize) {
    let statement = &STATEMENTS[number - 1];
    assert_eq!(usize::from(statement.number), number);
    assert_eq!(statement.run(&direct), Verdict::Holds, "{statement}");
    #[cfg(feature = "virtio-queue")]
    {
        let queued = |setup: &Setup| -> Option<Box<dyn Subject>> {
            Some(Box::new(subjects::queued::Queued::new(setup)))
        };
        assert_eq!(
            statement.run(&queued),
            Verdict::Holds,
            "{statement}, over queues"
        );
    }
}

macro_rules! named {
    ($($number:literal $name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                holds($number);
            }
        )*

        #[test]
        fn every_statement_has_its_test() {
            let numbers = [$($number),*];
            let expected: Vec<usize> = (1..=40).collect();
            assert_eq!(numbers.as_slice(), expected);
            assert_eq!(STATEMENTS.len(), 40);
        }
    };
}

named! {
    1 s01_map_unmap_is_offered_and_bypass_never_twice,
    2 s02_page_size_mask_is_not_zero,
    3 s03_bypass_reads_0_or_1,
    4 s04_bypass_survives_a_reset_and_reverts_on_a_system_reset,
    5 s05_other_fields_are_not_written,
    6 s06_a_reset_leaves_no_endpoint_attached,
    7 s07_an_unattached_endpoint_reaches_nothing,
    8 s08_bypass_needs_no_acceptance,
    9 s09_an_unknown_type_is_not_answered,
    10 s10_what_cannot_be_parsed_is_not_answered,
    11 s11_failures_are_written,
    12 s12_reserved_bytes_of_head_and_tail,
    13 s13_attach_with_a_reserved_field,
    14 s14_attach_with_an_unknown_flag,
    15 s15_attach_of_an_unknown_endpoint,
    16 s16_attach_against_the_domains_kind,
    17 s17_attach_of_an_attached_endpoint,
    18 s18_joining_a_populated_domain,
    19 s19_detach_errors,
    20 s20_no_access_after_detach,
    21 s21_the_last_detach_destroys_the_domain,
    22 s22_map_misaligned,
    23 s23_map_overlapping,
    24 s24_map_with_an_unknown_flag,
    25 s25_map_in_the_wrong_domain,
    26 s26_map_outside_the_input_range,
    27 s27_map_over_a_reserved_region,
    28 s28_no_access_without_permission,
    29 s29_unmap_does_not_split,
    30 s30_unmap_over_gaps_and_the_seven_examples,
    31 s31_unmap_in_the_wrong_domain,
    32 s32_probe_of_an_unknown_endpoint,
    33 s33_probe_lengths,
    34 s34_reserved_regions_do_not_overlap,
    35 s35_fault_reports,
    36 s36_faults_without_buffers,
    37 s37_complete_before_published,
    38 s38_extremes,
    39 s39_nothing_outstanding_after_unmap,
    40 s40_caps,
}

/// Each broken device fails its own statement and no other. Each statement has at least one. A
/// deviation that no statement forbids fails none.
#[test]
fn every_check_fails_on_a_flawed_device() {
    let mut wrong = Vec::new();
    let mut caught = [0_usize; 41];
    for &(number, flaw) in FLAWS {
        let make = |setup: &Setup| -> Option<Box<dyn Subject>> {
            Some(Box::new(Broken::new(setup, flaw)))
        };
        let failed: Vec<(u8, &str)> = STATEMENTS
            .iter()
            .filter_map(|statement| match statement.run(&make) {
                Verdict::Holds => None,
                Verdict::Fails(what) => Some((statement.number, what)),
                Verdict::NotApplicable => Some((statement.number, "not applicable")),
            })
            .collect();
        let expected = Some(number).filter(|number| *number > 0);
        if failed.iter().map(|(failed, _)| *failed).ne(expected) {
            wrong.push(format!("{flaw:?} breaks {number}, found {failed:?}"));
        }
        caught[usize::from(number)] += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(caught[1..].iter().all(|count| *count > 0), "{caught:?}");
}
